"""The store's lock: many writers share it, a clean-up holds it alone.

``flock`` on ``.blobstore/lock``: the kernel frees it when its holder dies, so there is nothing stale to clean up.
Ollama does not take it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blobstore.errors import BusyError
from blobstore.store.files import FILE_MODE, make_folder, os_errors


def lock_file(path: Path, kind: int = fcntl.LOCK_EX) -> int:
    """Return an open file at ``path``, made when missing and locked until it is closed. Raises: OSError, BlockingIOError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


class StoreLock:
    """A lock file; made when it is first taken."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock beside other sharers. Raises: BusyError while it is held alone; StorageError."""
        with self._held(fcntl.LOCK_SH):
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock alone. Raises: BusyError while anybody else holds it; StorageError."""
        with self._held(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        with os_errors("write to the store", self._path.parent):
            make_folder(self._path.parent)
            try:
                fd = lock_file(self._path, kind)
            except BlockingIOError:
                raise BusyError(f"the store is in use by another process ({self._path})", path=str(self._path)) from None
        try:
            yield
        finally:
            os.close(fd)
