"""The store's lock: many writers share it, a clean-up holds it alone.

``flock`` on ``.blobstore/lock``: the kernel frees it when its holder dies, so there is nothing stale to clean up.
Ollama does not take it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blobstore.errors import BusyError
from blobstore.store.files import FILE_MODE, make_folder, os_errors

_POLL_S = 0.02


class StoreLock:
    """A lock file; made when it is first taken."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def shared(self, wait_s: float = 10) -> Iterator[None]:
        """Hold the lock beside other sharers. Raises: BusyError when it is held alone for ``wait_s``; StorageError."""
        with self._held(fcntl.LOCK_SH, wait_s):
            yield

    @contextmanager
    def exclusive(self, wait_s: float = 1) -> Iterator[None]:
        """Hold the lock alone. Raises: BusyError when anybody else holds it for ``wait_s`` seconds; StorageError."""
        with self._held(fcntl.LOCK_EX, wait_s):
            yield

    @contextmanager
    def _held(self, kind: int, wait_s: float) -> Iterator[None]:
        with os_errors("write to the store", self._path.parent):
            make_folder(self._path.parent)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            self._take(fd, kind, time.monotonic() + wait_s)
            yield
        finally:
            os.close(fd)

    def _take(self, fd: int, kind: int, until: float) -> None:
        with os_errors("lock", self._path):
            while True:
                try:
                    return fcntl.flock(fd, kind | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() >= until:
                        break
                    time.sleep(_POLL_S)
        raise BusyError(f"the store is in use by another process ({self._path})", path=str(self._path))
