"""Disks that are too small, by every number of blocks and of files from none to enough: refused, and the store as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path

from support.lab.cases import ZERO, Case, sample, standard_cases
from support.lab.command import Done
from support.lab.commands import as_it_is
from support.lab.figures import Figures
from support.lab.mounts import keep_mounts_private, mount
from support.lab.system_calls import Call

SHORT = 16
_TRIED = ("import quantized", "import over an older one", "import of a large tensor", "cp over another", "rm", "prune")
_ENOUGH = 10_000


def experiment(folder: Path, count: int | None, seed: int) -> Figures:
    """Return what became of commands on ``count`` disks of different sizes, None: of every size."""
    keep_mounts_private()
    figures = Figures("disks", "commands", "refused", "done", zero=(*ZERO, "unclear", "left behind", "never enough"))
    cases = [case for case in standard_cases(folder.parent / "cases") if case.command.name in _TRIED]
    (disk := folder / "disk").mkdir()
    with mount("tmpfs", disk, f"size={_ENOUGH * 4096},nr_inodes={_ENOUGH}"):
        (disk / "ballast").write_bytes(b"x")  # a size of 0 would be no limit at all
        sizes = [(case, *room) for case in cases for room in _rooms(case, disk)]
        for case, blocks, files in sample(sizes, count):
            done = on_a_disk(case, disk, blocks, files, figures)
            is_whole = blocks >= _ENOUGH // 2 and files >= _ENOUGH // 2
            figures.expect(done.code == 0 or not is_whole, "never enough", case.command.name)
        control(cases[0], disk, figures)
    figures.add("commands", len(cases))
    return figures


def control(case: Case, disk: Path, figures: Figures) -> None:
    """Run an import that does not look at whether it could write."""
    found = Figures(zero=(*ZERO, "unclear", "left behind"), quiet=True)
    careless = copy(case)
    careless.command = replace(case.command, before=_ignore_writes)
    on_a_disk(careless, disk, 4, _ENOUGH // 2, found)
    figures.control(found)


def _ignore_writes() -> None:
    as_it_is()
    real = os.pwrite

    def write(fd: int, data: bytes, offset: int) -> int:
        with suppress(OSError):
            real(fd, data, offset)
        return len(memoryview(data))

    os.pwrite = write


def _rooms(case: Case, disk: Path) -> Iterator[tuple[int, int]]:
    """Yield the numbers of free blocks and files to try: all that are too few, and enough."""
    left = Least(disk)
    with _store_on(case, disk) as root:
        before = os.statvfs(disk)
        case.run(root, left)
    yield from ((blocks, _ENOUGH // 2) for blocks in range(before.f_bfree - left.blocks + 1))
    yield from ((_ENOUGH // 2, files) for files in range(before.f_ffree - left.files + 1))
    yield _ENOUGH // 2, _ENOUGH // 2


class Least:
    """The least room on a disk at any call of a command."""

    def __init__(self, disk: Path) -> None:
        """Look at the file system of ``disk``."""
        self._disk = disk
        self.blocks = self.files = _ENOUGH

    def __call__(self, _call: Call) -> None:
        """Look before a call."""
        status = os.statvfs(self._disk)
        self.blocks = min(self.blocks, status.f_bfree)
        self.files = min(self.files, status.f_ffree)


@contextmanager
def _store_on(case: Case, disk: Path) -> Iterator[Path]:
    root = case.copy(disk / "store")
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def on_a_disk(case: Case, disk: Path, blocks: int, files: int, figures: Figures) -> Done:
    """Run a command on a disk with so much room, look, and run it again with enough."""
    what = f"{blocks} free blocks, {files} free files"
    with _store_on(case, disk) as root:
        leave_room(disk, blocks, files)
        done = case.run(root)
        figures.add("disks")
        figures.add("refused" if done.code else "done")
        found = case.check(root, done, figures, what)
        if done.code != 0:
            at = f"{case.command.name}, {what}: {done.code} {done.err}"
            is_clear = done.code == 1 and "no space left on device" in done.err and done.err.count("\n") <= 2
            figures.expect(is_clear, "unclear", at)
            figures.expect(found.models == case.start.models, "lost", f"{at}: {found.models}")
            left = (set(found.temporary) - set(case.start.temporary), set(found.orphans) - set(case.start.orphans))
            figures.expect(not any(left), "left behind", f"{at}: {left}")
        leave_room(disk, _ENOUGH, _ENOUGH)
        case.check_again(root, figures, what)
    return done


def leave_room(disk: Path, blocks: int, files: int) -> None:
    """Make a mounted tmpfs so small that only so many blocks of 4 KiB and so many files are free."""
    status = os.statvfs(disk)
    size = (status.f_blocks - status.f_bfree + blocks) * status.f_frsize
    options = f"remount,size={size},nr_inodes={status.f_files - status.f_ffree + files}"
    subprocess.run(["mount", "-o", options, disk], check=True)
