"""Mounts, which need root: of an experiment's own, or for a test."""

import ctypes
import functools
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

_NEW_MOUNTS = 0x20000
_RECURSIVE, _PRIVATE = 1 << 14, 1 << 18


class NotShownError(Exception):
    """This machine can't show a fault: a tool, a right or a kernel is missing."""


def cannot_run(why: object) -> NoReturn:
    """Fail in CI, where every fault has to be shown; skip the test elsewhere, with a message."""
    if "CI" in os.environ:
        pytest.fail(f"{why}")
    pytest.skip(f"FAULT NOT SHOWN: {why}")


@functools.cache
def keep_mounts_private() -> None:
    """Mount nothing for others from here on: the mounts go with this process.

    A second call does nothing, or what was mounted by then could not be unmounted.

    Raises: NotShownError without the right to mount.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if (
        library.unshare(_NEW_MOUNTS) != 0
        or library.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None) != 0
    ):
        raise NotShownError(f"mounting needs root: {os.strerror(ctypes.get_errno())}")


@contextmanager
def mount(kind: str, folder: Path, options: str, device: str | Path = "none") -> Iterator[Path]:
    """Mount a file system for as long as the block lasts. Raises: NotShownError."""
    line = ["mount", "-t", kind, "-o", options, device, folder]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotShownError(f"can't mount {device} ({kind}, {options}): {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def mounted(
    folder: Path, options: str, kind: str = "tmpfs", device: str | Path = "none"
) -> Iterator[Path]:
    """`mount` on a folder that may be missing. Where that is impossible: see `cannot_run`."""
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(mount(kind, folder, options, device))
        except NotShownError as error:
            cannot_run(error)
        yield folder
