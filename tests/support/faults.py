"""Faults on demand that need root: devices, small and read-only disks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest


def cannot_run(why: str) -> NoReturn:
    """Fail in CI, where every fault has to be shown; skip the test elsewhere, with a message."""
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
        cannot_run(f"a disk of its own needs a mount, and so root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """Change the options of a mounted tmpfs: ``ro`` is read-only for root too."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)
