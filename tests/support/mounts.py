"""Mounts of an experiment's own: they go with its process, also when it is killed."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NEW_MOUNTS = 0x20000
_RECURSIVE, _PRIVATE = 1 << 14, 1 << 18


class NotShownError(Exception):
    """This machine can't show a fault: a tool, a right or a kernel is missing."""


@functools.cache
def keep_mounts_private() -> None:
    """Mount nothing for others from here on.

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
