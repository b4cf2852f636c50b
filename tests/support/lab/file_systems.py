"""The file systems for stores (``--on``), each mounted while a block lasts.

``memory`` is what the experiments use that are not about a file system. The others are made on
disks in memory; overlays and the passing FUSE file systems lie over such a memory. What a file
system has no kernel for here is said by its mount.
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
from typing import Protocol

from support.lab.figures import NotShownError
from support.lab.mounts import mount

_NBYTES = 3 * 2**28


class Stores(Protocol):
    """How a store is copied for a run of a command, and removed after it."""

    def copy(self, base: Path, root: Path) -> None:
        """Make a copy at ``root`` of the store at ``base``."""

    def remove(self, root: Path) -> None:
        """Remove a copy."""


class Copied:
    """Stores that are copied file by file."""

    def copy(self, base: Path, root: Path) -> None:
        """Copy all files."""
        shutil.copytree(base, root, symlinks=True)

    def remove(self, root: Path) -> None:
        """Remove all files."""
        shutil.rmtree(root, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Overlaid:
    """Stores in the lower layer of an overlay of their own.

    With ``partly``, every second file lies in the upper one.
    """

    partly: bool

    def copy(self, base: Path, root: Path) -> None:
        """Mount an overlay over the store."""
        layers = _layers(root)
        for folder in (root, layers / "upper", layers / "work"):
            folder.mkdir(parents=True)
        options = f"lowerdir={base},upperdir={layers / 'upper'},workdir={layers / 'work'}"
        _run("mount", "-t", "overlay", "-o", options, "overlay", root)
        if self.partly:
            for path in sorted(path for path in root.rglob("*") if path.is_file())[::2]:
                os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))

    def remove(self, root: Path) -> None:
        """Unmount the overlay, where there is one, and remove what was written to it."""
        if root.is_mount():
            _run("umount", root)
        for folder in (root, _layers(root)):
            shutil.rmtree(folder, ignore_errors=True)


def _layers(root: Path) -> Path:
    return root.with_name(f"{root.name}.layers")


Mounted = Callable[[Path], AbstractContextManager[Path]]


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A file system: ``mounted`` yields a folder on it, below a folder for what that needs.

    ``disk``: the format (formats.py) that its power cuts are tried on; nothing for one without a
    disk.
    """

    name: str
    mounted: Mounted
    disk: str = ""
    stores: Stores = Copied()  # noqa: RUF009  # it has no state


@contextmanager
def _memory(folder: Path) -> Iterator[Path]:
    yield folder


@contextmanager
def _tmpfs(folder: Path) -> Iterator[Path]:
    with mount("tmpfs", _made(folder / "mounted"), f"size={_NBYTES}") as target:
        yield target


@contextmanager
def _on_a_disk(kind: str, make: tuple[str, ...], folder: Path) -> Iterator[Path]:
    """Mount a file system of the kernel's on a disk that is a file."""
    with mount(kind, _made(folder / "mounted"), "loop", _disk(folder, make)) as target:
        yield target


@contextmanager
def _overlay(folder: Path) -> Iterator[Path]:
    with (
        _tmpfs(folder) as memory,
        mount("overlay", _made(memory / "merged"), _overlaid(memory)) as target,
    ):
        yield target


@contextmanager
def _fuse_overlay(folder: Path) -> Iterator[Path]:
    with (
        _tmpfs(folder) as memory,
        _by_program(_made(memory / "merged"), "fuse-overlayfs", "-o", _overlaid(memory)) as target,
    ):
        yield target


def _overlaid(memory: Path) -> str:
    """Make the three folders of an overlay; return them as mount's options."""
    lower, upper, work = (_made(memory / name) for name in ("lower", "upper", "work"))
    return f"lowerdir={lower},upperdir={upper},workdir={work}"


@contextmanager
def _bind(folder: Path) -> Iterator[Path]:
    with (
        _tmpfs(folder) as memory,
        _by_program(_made(memory / "bound"), "bindfs", _made(memory / "real")) as target,
    ):
        yield target


@contextmanager
def _exfat(folder: Path) -> Iterator[Path]:
    disk = _disk(folder, ("mkfs.exfat",))
    device = _run("losetup", "--find", "--show", disk)
    try:
        with _by_program(_made(folder / "mounted"), "mount.exfat-fuse", device) as target:
            yield target
    finally:
        _run("losetup", "--detach", device)


@contextmanager
def _ntfs(folder: Path) -> Iterator[Path]:
    disk = _disk(folder, ("mkfs.ntfs", "-q", "-F"))
    with _by_program(_made(folder / "mounted"), "lowntfs-3g", "-o", "ignore_case", disk) as target:
        yield target


@contextmanager
def _vfat(folder: Path) -> Iterator[Path]:
    disk = _disk(folder, ("mkfs.vfat",))
    with _by_program(_made(folder / "mounted"), "fusefat", "-o", "rw+", disk) as target:
        try:
            (target / "tried").open("x+b").close()
        except OSError as error:
            raise NotShownError(f"nothing can be written to vfat by fusefat: {error}") from error
        yield target


@contextmanager
def _by_program(folder: Path, *line: str | Path) -> Iterator[Path]:
    """Mount what a program serves through FUSE."""
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


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _run(*line: str | Path) -> str:
    """Run a program and return what it says.

    Raises: NotShownError when it is not installed, or fails.
    """
    with TemporaryFile(
        "w+"
    ) as said:  # a pipe would stay open as long as a program that serves through FUSE
        try:
            done = subprocess.run(
                line, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False
            )
        except FileNotFoundError as error:
            raise NotShownError(f"{line[0]} is not installed") from error
        said.seek(0)
        text = said.read().strip()
    if done.returncode != 0:
        raise NotShownError(f"{' '.join(map(str, line))}: {text}")
    return text


MEMORY = FileSystem("memory", _memory, disk="ext4")
_EVERY = (
    FileSystem("ext4", partial(_on_a_disk, "ext4", ("mkfs.ext4", "-q", "-F")), disk="ext4"),
    FileSystem("xfs", partial(_on_a_disk, "xfs", ("mkfs.xfs", "-q", "-f")), disk="xfs"),
    FileSystem(
        "btrfs", partial(_on_a_disk, "btrfs", ("mkfs.btrfs", "-q", "-f", "--mixed")), disk="btrfs"
    ),
    FileSystem("overlay", _overlay),
    FileSystem("overlay-lower", _tmpfs, stores=Overlaid(partly=False)),
    FileSystem("overlay-partly", _tmpfs, stores=Overlaid(partly=True)),
    FileSystem("fuse-overlayfs", _fuse_overlay),
    FileSystem("bindfs", _bind),
    FileSystem("exfat", _exfat),
    FileSystem("ntfs", _ntfs),
    FileSystem("vfat", _vfat),
)
FILE_SYSTEMS = {made.name: made for made in _EVERY}
"""File systems by the names that the command line knows them by."""
