"""Disks that are too small (tmpfs), by every number of blocks and files: nothing is changed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path

from faults.lab.cases import ZERO, Case, Figures, Task, all_cases
from faults.lab.command import Done
from faults.lab.commands import as_it_is
from faults.lab.file_systems import MEMORY
from faults.lab.stops import Call
from support.mounts import NotShownError, keep_mounts_private, mount

from blobstore.hashing import Bytes
from blobstore.io import _native

_TRIED = (
    "import quantized",
    "import over an older one",
    "import of a large tensor",
    "cp over another",
    "unpack",
    "rm",
    "prune",
    "export",
    "metadata set with a longer header",
)
_ENOUGH = 10_000
_HALF = _ENOUGH // 2
_BLOCK = 4096
_ZERO = (*ZERO, "unclear", "left behind", "never enough")


def experiment(task: Task) -> Figures:
    """Return what became of commands on so many disks of different sizes; in long form of all."""
    if task.file_system is not MEMORY:
        raise NotShownError(f"the room on {task.file_system.name} can't be set exactly")
    keep_mounts_private()
    figures = Figures("disks", "commands", "refused", "done", zero=_ZERO)
    (folder := task.folder / "disk").mkdir()
    with mount("tmpfs", folder, f"size={_ENOUGH * _BLOCK},nr_inodes={_ENOUGH}"):
        (folder / "file").write_bytes(b"x")  # a size of 0 would be no limit at all
        cases = [
            case for case in all_cases(task.folder.parent / "cases") if case.command.name in _TRIED
        ]
        sizes = [(case, *room) for case in cases for room in _rooms(case, folder)]
        for case, blocks, files in task.pick(sizes):
            done = on_a_disk(case, folder, blocks, files, figures)
            is_whole = blocks >= _HALF and files >= _HALF
            figures.expect(done.code == 0 or not is_whole, "never enough", case.command.name)
        control(cases[0], folder, figures)
    figures.most("commands", len(cases))
    return figures


def control(case: Case, folder: Path, figures: Figures) -> None:
    """Run an import that ignores errors of its writes."""
    found = Figures(zero=_ZERO, quiet=True)
    careless = copy(case)
    careless.command = replace(case.command, before=_ignore_writes)
    on_a_disk(careless, folder, 4, _HALF, found)
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


def _room(folder: Path) -> tuple[int, int]:
    """Return the numbers of free blocks of 4 KiB and of free files."""
    status = os.statvfs(folder)
    return status.f_bfree * status.f_frsize // _BLOCK, status.f_ffree


def _leave_room(folder: Path, blocks: int, files: int) -> None:
    status = os.statvfs(folder)
    size = (status.f_blocks - status.f_bfree + blocks) * status.f_frsize
    options = f"remount,size={size},nr_inodes={status.f_files - status.f_ffree + files}"
    subprocess.run(["mount", "-o", options, folder], check=True)


def _rooms(case: Case, folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the numbers of free blocks and files to try: all that are too few, and enough."""
    root = case.copy(folder / "store")
    first = least = _room(folder)

    def note(_call: Call) -> None:
        nonlocal least
        now = _room(folder)
        least = (min(least[0], now[0]), min(least[1], now[1]))

    case.run(root, note)
    case.remove(root)
    yield from ((some, _HALF) for some in range(first[0] - least[0] + 1))
    yield from ((_HALF, some) for some in range(first[1] - least[1] + 1))
    yield _HALF, _HALF


def on_a_disk(case: Case, folder: Path, blocks: int, files: int, figures: Figures) -> Done:
    """Run a command on a disk with so much room, check, and run it again with enough."""
    what = f"{blocks} free blocks, {files} free files"
    root = case.copy(folder / "store")
    try:
        _leave_room(folder, blocks, files)
        done = case.run(root)
        figures.add("disks")
        figures.add("refused" if done.code else "done")
        found = case.check(root, done, figures, what)
        if done.code != 0:
            at = f"{case.command.name}, {what}: {done.code} {done.err}"
            is_clear = done.code == 1 and "no space left on device" in done.err
            figures.expect(is_clear and done.err.count("\n") <= 2, "unclear", at)
            figures.expect(found.models == case.start.models, "lost", f"{at}: {found.models}")
            case.check_left(found, figures, what)
            left = (
                set(found.orphans) - set(case.start.orphans),
                set(found.unneeded_packed) - set(case.start.unneeded_packed),
            )
            figures.expect(not any(left), "left behind", f"{at}: {left}")
        _leave_room(folder, _ENOUGH, _ENOUGH)
        case.check_again(root, figures, what)
    finally:
        case.remove(root)
    return done
