"""Disks that are too small (tmpfs), by every number of blocks and files: nothing is changed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from faults.lab.cases import Case, Figures, Task
from faults.lab.stops import Call
from support.mounts import keep_mounts_private, mount

_TRIED = (
    *("import", "import over an older one", "import of a large tensor", "cp over another"),
    *("unpack", "rm", "prune", "export", "metadata set in a longer header"),
)
_ENOUGH = 10_000
_HALF = _ENOUGH // 2
_BLOCK = 4096


def experiment(task: Task) -> Figures:
    """Return what became of commands on so many disks of different sizes; in long form of all."""
    keep_mounts_private()
    figures = Figures()
    (folder := task.folder / "disk").mkdir()
    with mount("tmpfs", folder, f"size={_ENOUGH * _BLOCK},nr_inodes={_ENOUGH}"):
        (folder / "file").write_bytes(b"x")  # a size of 0 would be no limit at all
        cases = [case for case in task.cases() if case.command.name in _TRIED]
        sizes = [(case, *room) for case in cases for room in _rooms(case, folder)]
        for case, blocks, files in task.pick(sizes):
            _run_on_a_disk(case, folder, blocks, files, figures)
    return figures


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
    blocks, files = _room(folder)
    least = [(blocks, files)]

    def note(_call: Call) -> None:
        least.append(_room(folder))

    case.run(root, note)
    case.remove(root)
    yield from ((some, _HALF) for some in range(blocks - min(room[0] for room in least) + 1))
    yield from ((_HALF, some) for some in range(files - min(room[1] for room in least) + 1))
    yield _HALF, _HALF


def _run_on_a_disk(case: Case, folder: Path, blocks: int, files: int, figures: Figures) -> None:
    """Run a command on a disk with so much room, check, and run it again with enough."""
    what = f"{blocks} free blocks, {files} free files"
    root = case.copy(folder / "store")
    try:
        _leave_room(folder, blocks, files)
        done = case.run(root)
        figures.counts["refused" if done.code else "done"] += 1
        found = case.check(root, done, figures, what)
        at = f"{case.command.name}, {what}: {done}"
        if done.code != 0:
            case.check_refused(done, figures, what)
            is_full = "no space left on device" in done.err and min(blocks, files) < _HALF
            figures.expect(is_full, "unclear", at)
            figures.expect(found.models == case.start.models, "lost", f"{at}: {found.models}")
            left = {*found.temporary, *found.orphans}
            left -= {*case.start.temporary, *case.start.orphans}
            figures.expect(not left, "left behind", f"{at}: {left}")
        _leave_room(folder, _ENOUGH, _ENOUGH)
        case.check_again(root, figures, what)
    finally:
        case.remove(root)
