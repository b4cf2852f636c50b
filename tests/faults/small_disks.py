"""Disks that are too small, by every number of blocks and files: refused, the store unchanged.

In memory the disk is a tmpfs of that size. Any other file system is filled up by a file; its number
of files is its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path

from support.lab.cases import ZERO, Case, standard_cases
from support.lab.command import Done
from support.lab.commands import as_it_is
from support.lab.figures import Figures, NotShownError
from support.lab.file_systems import MEMORY
from support.lab.mounts import keep_mounts_private, mount
from support.lab.system_calls import Call
from support.lab.task import Task

from blobstore.hashing import Bytes
from blobstore.io import _native

SHORT = 16
_TRIED = (
    "import quantized",
    "import over an older one",
    "import of a large tensor",
    "cp over another",
    "unpack",
    "rm",
    "prune",
)
_ENOUGH = 10_000
_BLOCK = 4096
_STEPS = 8


def experiment(task: Task) -> Figures:
    """Return what became of commands on so many disks of different sizes.

    Of every size in the long form.
    """
    keep_mounts_private()
    figures = Figures(
        "disks",
        "commands",
        "refused",
        "done",
        zero=(*ZERO, "unclear", "left behind", "never enough"),
    )
    cases = [
        case for case in standard_cases(task.folder.parent / "cases") if case.command.name in _TRIED
    ]
    with _disk(task) as disk:
        sizes = [(case, *room) for case in cases for room in _rooms(case, disk)]
        for case, blocks, files in task.pick(sizes):
            done = on_a_disk(case, disk, blocks, files, figures)
            is_whole = blocks >= _ENOUGH // 2 and files >= _ENOUGH // 2
            figures.expect(done.code == 0 or not is_whole, "never enough", case.command.name)
        if task.is_first and isinstance(
            disk, Memory
        ):  # elsewhere folders take blocks, too, and it is refused one
            control(cases[0], disk, figures)
    if not figures.counts["refused"] and len(sizes) > len(cases):
        raise NotShownError(f"{task.file_system.name} could not be filled up: {figures}")
    figures.most("commands", len(cases))
    return figures


class Disk(ABC):
    """A disk whose free room can be set."""

    def __init__(self, folder: Path) -> None:
        """Take a folder on it."""
        self.folder = folder
        self._ballast = folder / "ballast"
        self._ballast.write_bytes(b"x")

    @abstractmethod
    def leave_room(self, blocks: int, files: int) -> None:
        """Leave so many blocks of 4 KiB free, and so many files where their number is limited."""

    def room(self) -> tuple[int, int]:
        """Return the numbers of free blocks of 4 KiB and of free files."""
        status = os.statvfs(self.folder)
        return status.f_bfree * status.f_frsize // _BLOCK, status.f_ffree


class Memory(Disk):
    """A tmpfs; what it can hold is changed."""

    def leave_room(self, blocks: int, files: int) -> None:
        """Mount it anew."""
        status = os.statvfs(self.folder)
        size = (status.f_blocks - status.f_bfree + blocks) * status.f_frsize
        options = f"remount,size={size},nr_inodes={status.f_files - status.f_ffree + files}"
        subprocess.run(["mount", "-o", options, self.folder], check=True)


class Filled(Disk):
    """A folder on any file system, which is filled up."""

    def leave_room(self, blocks: int, files: int) -> None:  # their number is not limited
        """Resize the ballast in steps, because it takes blocks for itself, too."""
        with self._ballast.open("r+b") as file:
            for _ in range(_STEPS):
                os.sync()  # what was removed is free only then on some file systems
                missing = (self.room()[0] - blocks) * _BLOCK
                size = os.fstat(file.fileno()).st_size
                if missing == 0:
                    break
                with suppress(OSError):  # the last blocks are not for everybody
                    if missing < 0:
                        os.ftruncate(file.fileno(), max(size + missing, 0))
                    else:
                        os.posix_fallocate(file.fileno(), size, missing)


@contextmanager
def _disk(task: Task) -> Iterator[Disk]:
    (folder := task.folder / "disk").mkdir()
    if task.file_system is not MEMORY:
        yield Filled(folder)
        shutil.rmtree(folder)  # others need the room
        return
    with mount("tmpfs", folder, f"size={_ENOUGH * _BLOCK},nr_inodes={_ENOUGH}"):
        yield Memory(folder)  # with something in it: a size of 0 would be no limit at all


def control(case: Case, disk: Disk, figures: Figures) -> None:
    """Run an import that does not look at whether it could write."""
    found = Figures(zero=(*ZERO, "unclear", "left behind"), quiet=True)
    careless = copy(case)
    careless.command = replace(case.command, before=_ignore_writes)
    on_a_disk(careless, disk, 4, _ENOUGH // 2, found)
    figures.control(found)


def _ignore_writes() -> None:
    as_it_is()
    real, together = os.pwrite, _native.write_parts

    def write(fd: int, data: bytes, offset: int) -> int:
        with suppress(OSError):
            real(fd, data, offset)
        return len(memoryview(data))

    def write_parts(parts: Sequence[tuple[int, int, Bytes]]) -> None:
        for part in parts:
            with suppress(OSError):
                together([part])

    os.pwrite = write  # type: ignore[assignment]  # ours are bytes
    _native.write_parts = write_parts


def _rooms(case: Case, disk: Disk) -> Iterator[tuple[int, int]]:
    """Yield the numbers of free blocks and files to try: all that are too few, and enough."""
    left = Least(disk)
    with _store_on(case, disk) as root:
        blocks, files = disk.room()
        case.run(root, left)
    yield from ((some, _ENOUGH // 2) for some in range(blocks - left.blocks + 1))
    if isinstance(disk, Memory):
        yield from ((_ENOUGH // 2, some) for some in range(files - left.files + 1))
    yield _ENOUGH // 2, _ENOUGH // 2


class Least:
    """The least room on a disk at any call of a command."""

    def __init__(self, disk: Disk) -> None:
        """Look at the disk."""
        self._disk = disk
        self.blocks, self.files = disk.room()

    def __call__(self, _call: Call) -> None:
        """Look before a call."""
        blocks, files = self._disk.room()
        self.blocks, self.files = min(self.blocks, blocks), min(self.files, files)


@contextmanager
def _store_on(case: Case, disk: Disk) -> Iterator[Path]:
    root = case.copy(disk.folder / "store")
    try:
        yield root
    finally:
        case.remove(root)


def on_a_disk(case: Case, disk: Disk, blocks: int, files: int, figures: Figures) -> Done:
    """Run a command on a disk with so much room, look, and run it again with enough."""
    what = f"{blocks} free blocks, {files} free files"
    with _store_on(case, disk) as root:
        disk.leave_room(blocks, files)
        done = case.run(root)
        figures.add("disks")
        figures.add("refused" if done.code else "done")
        found = case.check(root, done, figures, what)
        if done.code != 0:
            at = f"{case.command.name}, {what}: {done.code} {done.err}"
            is_clear = (
                done.code == 1
                and "no space left on device" in done.err
                and done.err.count("\n") <= 2
            )
            figures.expect(is_clear, "unclear", at)
            figures.expect(found.models == case.start.models, "lost", f"{at}: {found.models}")
            left = (
                set(found.temporary) - set(case.start.temporary),
                set(found.orphans) - set(case.start.orphans),
                set(found.unneeded_packed) - set(case.start.unneeded_packed),
            )
            figures.expect(not any(left), "left behind", f"{at}: {left}")
        disk.leave_room(_ENOUGH, _ENOUGH)
        case.check_again(root, figures, what)
    return done
