"""Faults on demand: small and read-only disks, and system calls that fail or kill."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

STRACE = "/usr/bin/strace"
MUTATING = (
    *(
        "mkdir",
        "mkdirat",
        "ftruncate",
        "pwrite64",
        "pwritev",
        "write",
        "fsync",
        "syncfs",
        "utimensat",
    ),
    *("rename", "renameat", "renameat2", "flock", "copy_file_range"),
)
"""Calls by which an import changes the disk, but for the creation of files.

Not every machine has all of them.
"""
READING = ("preadv", "preadv2")
CLEANING = ("unlink", "unlinkat", "rmdir")
_CALL = re.compile(r"(?P<thread>\d+) +(?P<name>\w+)\((?P<argument>\d*)", re.ASCII)
_PRINTED = {("write", "1"), ("write", "2")}
_ONE_AFTER_THE_OTHER = """
from blobstore.importer import writing
from blobstore.store.local import session
writing._SPARE_THREADS = 0
session._NOTE_EVERY_S = -1
from blobstore.cli.main import main
main()
"""
"""The command with a fixed number of threads, which notes every finished blob.

It makes the same calls in the same order every time.
"""


def cannot_run(why: str) -> NoReturn:
    """Fail in CI, where every fault has to be shown.

    Elsewhere say loudly that this one was not (pytest prints why).
    """
    if "CI" in os.environ:
        pytest.fail(why)
    pytest.skip(f"FAULT NOT SHOWN: {why}")


def make_device(path: Path) -> None:
    """Make a device without an end. Where that is impossible: see `cannot_run`."""
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))  # as /dev/zero
    except PermissionError as error:
        cannot_run(f"a device needs root: {error}")


@contextmanager
def file_system(folder: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs with ``options`` on a new folder for as long as the block lasts.

    Where that is impossible: see `cannot_run`.
    """
    folder.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        cannot_run(f"a full disk needs a mount, and so root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """Change the options of a mounted tmpfs: ``ro`` is read-only for root too."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def leave_room(folder: Path, *, blocks: int = 1000, files: int = 1000) -> None:
    """Shrink a mounted tmpfs to so many free blocks of 4 KiB and so many free files."""
    status = os.statvfs(folder)
    size = (status.f_blocks - status.f_bfree + blocks) * status.f_frsize
    remount(folder, f"size={size},nr_inodes={status.f_files - status.f_ffree + files}")


def run(*arguments: object, prefix: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``blobstore ARGUMENTS…`` behind ``prefix`` so that its calls can be counted.

    Python writes no bytecode.
    """
    line = [*(prefix or []), sys.executable, "-c", _ONE_AFTER_THE_OTHER, *map(str, arguments)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        line, capture_output=True, text=True, check=False, timeout=300, env=environment
    )


def strace(log: Path, *rules: str) -> list[str]:
    """Return the command prefix that traces calls to ``log`` and injects faults by ``rules``.

    ``when=N`` in a rule counts the calls of each name in each thread for itself.
    """
    if not Path(STRACE).exists():
        cannot_run("strace is not installed")
    # With it only the traced calls stop, which saves up to a second; but strace 6.1 then sends no
    # signals.
    fast = ["--seccomp-bpf"] if not any("signal=" in rule for rule in rules) else []
    traced = ",".join(f"?{name}" for name in (*MUTATING, *READING, *CLEANING))
    return [
        STRACE,
        "-f",
        *fast,
        "-o",
        str(log),
        "-e",
        f"trace={traced}",
        *(word for rule in rules for word in ("-e", f"inject={rule}")),
    ]


def calls(log: Path) -> dict[str, int]:
    """Return how often a run made each call, in its busiest thread (``when=`` is by thread).

    What is printed is not counted: it comes after everything else.
    """
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for line in log.read_text().splitlines():
        if (match := _CALL.match(line)) and (match["name"], match["argument"]) not in _PRINTED:
            counts[match["name"]][match["thread"]] += 1
    return {name: max(threads.values()) for name, threads in counts.items()}


def sample(points: list[tuple[str, int]], count: int) -> list[tuple[str, int]]:
    """Return ``count`` of the points, evenly spread, the first and the last among them."""
    if len(points) <= count:
        return points
    return [points[round(index * (len(points) - 1) / (count - 1))] for index in range(count)]
