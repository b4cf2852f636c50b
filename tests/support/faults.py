"""Faults on demand: small and read-only file systems, and system calls that fail or kill their caller."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

STRACE = "/usr/bin/strace"
MUTATING = (
    *("mkdir", "mkdirat", "ftruncate", "pwrite64", "pwritev", "write", "fsync", "syncfs", "utimensat"),
    *("rename", "renameat", "renameat2", "flock", "copy_file_range"),
)
"""Calls by which an import changes the disk, but for the creation of files; not every machine has all of them."""
READING = ("preadv", "preadv2")
CLEANING = ("unlink", "unlinkat", "rmdir")
_ONE_AFTER_THE_OTHER = """
from blobstore.importer.writing import write
from blobstore.store import ingest
write._SPARE_THREADS = 0
ingest._NOTE_EVERY_S = -1
from blobstore.cli import main
main()
"""
"""The command with as many threads as it is given and no more, which notes every finished blob: it makes the same calls
in the same order every time."""


def cannot_run(why: str) -> NoReturn:
    """Fail in CI, where every fault has to be shown; elsewhere say loudly that this one was not (pytest prints why)."""
    if "CI" in os.environ:
        pytest.fail(why)
    pytest.skip(f"FAULT NOT SHOWN: {why}")


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
    """Change the options of a mounted tmpfs: ``ro`` is read-only for root too, which no mode bits stop."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def run(*arguments: object, prefix: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``blobstore ARGUMENTS…`` so that its calls can be counted, behind ``prefix``; Python writes no bytecode."""
    line = [*(prefix or []), sys.executable, "-c", _ONE_AFTER_THE_OTHER, *map(str, arguments)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60, env=environment)


def strace(log: Path, *rules: str) -> list[str]:
    """Return the command prefix that traces the calls above to ``log`` and injects faults by ``rules``.

    ``when=N`` in a rule counts the calls of each name in each thread for itself.
    """
    if not Path(STRACE).exists():
        cannot_run("strace is not installed")
    # With it only the traced calls stop, which saves up to a second; but strace 6.1 then sends no signals.
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
