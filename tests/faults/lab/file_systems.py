"""The file systems for stores (``--on``), each mounted while a block lasts.

``memory`` is what the experiments use that are not about a file system. The others lie on disks in
memory; if this machine has no kernel or program for one, its mount says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

from support.mounts import NotShownError, mount

_NBYTES = 3 * 2**28


class Copied:
    """Stores that are copied file by file for a run of a command, and removed after it."""

    def copy(self, base: Path, root: Path) -> None:
        """Make a copy at ``root`` of the store at ``base``."""
        shutil.copytree(base, root, symlinks=True)

    def remove(self, root: Path) -> None:
        """Remove a copy."""
        shutil.rmtree(root, ignore_errors=True)


class Lower(Copied):
    """Stores in the lower layer of an overlay of their own, as in a container's image."""

    def copy(self, base: Path, root: Path) -> None:
        """Mount an overlay over the store."""
        layers = root.with_name(f"{root.name}.layers")
        for folder in (root, layers / "upper", layers / "work"):
            folder.mkdir(parents=True)
        options = f"lowerdir={base},upperdir={layers / 'upper'},workdir={layers / 'work'}"
        _run("mount", "-t", "overlay", "-o", options, "overlay", root)

    def remove(self, root: Path) -> None:
        """Unmount the overlay, where there is one, and remove what was written to it."""
        if root.is_mount():
            _run("umount", root)
        for folder in (root, root.with_name(f"{root.name}.layers")):
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A file system: ``mounted`` yields a folder on it, below a folder for what that needs.

    ``disk``: the format (disks.py) on which its power is cut; empty for one without a disk.
    """

    name: str
    mounted: Callable[[Path], AbstractContextManager[Path]]
    disk: str = ""
    stores: Copied = Copied()  # noqa: RUF009  # it has no state


@contextmanager
def _memory(folder: Path) -> Iterator[Path]:
    yield folder


@contextmanager
def _tmpfs(folder: Path) -> Iterator[Path]:
    (target := folder / "mounted").mkdir()
    with mount("tmpfs", target, f"size={_NBYTES}"):
        yield target


@contextmanager
def _on_a_disk(kind: str, make: tuple[str, ...], folder: Path) -> Iterator[Path]:
    """Mount a file system of the kernel's on a disk that is a file."""
    (target := folder / "mounted").mkdir()
    with mount(kind, target, "loop", _disk(folder, make)):
        yield target


@contextmanager
def _bind(folder: Path) -> Iterator[Path]:
    with _tmpfs(folder) as memory:
        (real := memory / "real").mkdir()
        with _served(memory / "bound", "bindfs", real) as target:
            yield target


@contextmanager
def _exfat(folder: Path) -> Iterator[Path]:
    device = _run("losetup", "--find", "--show", _disk(folder, ("mkfs.exfat",)))
    try:
        with _served(folder / "mounted", "mount.exfat-fuse", device) as target:
            yield target
    finally:
        _run("losetup", "--detach", device)


@contextmanager
def _ntfs(folder: Path) -> Iterator[Path]:
    disk = _disk(folder, ("mkfs.ntfs", "-q", "-F"))
    with _served(folder / "mounted", "lowntfs-3g", "-o", "ignore_case", disk) as target:
        yield target


@contextmanager
def _served(folder: Path, *line: str | Path) -> Iterator[Path]:
    """Mount what a program serves through FUSE."""
    folder.mkdir()
    _run(*line, folder)
    try:
        if not folder.is_mount():
            raise NotShownError(f"{line[0]} did not mount anything")
        yield folder
    finally:
        _run("umount", folder)


def _disk(folder: Path, make: tuple[str, ...]) -> Path:
    """Return a file with an empty file system in it. Raises: NotShownError."""
    disk = folder / "disk"
    disk.write_bytes(b"")
    os.truncate(disk, _NBYTES)
    _run(*make, disk)
    return disk


def _run(*line: str | Path) -> str:
    """Run a program and return its output.

    Raises: NotShownError when it is not installed, or fails.
    """
    with TemporaryFile("w+") as output:  # a program that serves through FUSE keeps a pipe open
        try:
            done = subprocess.run(
                line, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
            )
        except FileNotFoundError as error:
            raise NotShownError(f"{line[0]} is not installed") from error
        output.seek(0)
        text = output.read().strip()
    if done.returncode != 0:
        raise NotShownError(f"{' '.join(map(str, line))}: {text}")
    return text


def _kernels(kind: str, *options: str) -> FileSystem:
    return FileSystem(kind, partial(_on_a_disk, kind, (f"mkfs.{kind}", "-q", *options)), disk=kind)


MEMORY = FileSystem("memory", _memory, disk="ext4")
FILE_SYSTEMS = {
    made.name: made
    for made in (
        _kernels("ext4", "-F"),
        _kernels("xfs", "-f"),
        _kernels("btrfs", "-f", "--mixed"),
        FileSystem("overlay-lower", _tmpfs, stores=Lower()),
        FileSystem("bindfs", _bind),
        FileSystem("exfat", _exfat),
        FileSystem("ntfs", _ntfs),
    )
}
"""File systems by the names that the command line knows them by."""
