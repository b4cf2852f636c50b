"""Where an archive is written to: a file that appears when it is complete, or a pipe.

A file is written beside its place, as ``.NAME.saving``, and locked meanwhile. When it is complete
and durable, it gets its name. A file that a killed process left is written anew by the next one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from blobstore.errors import BusyError, StorageError, UsageError
from blobstore.hashing import Bytes
from blobstore.io.durable import FILE_MODE, os_errors, sync, sync_folder
from blobstore.io.ranges import close_quietly

_MOST_PARTS = 512
"""Parts of one call of writev: Linux takes 1,024 (IOV_MAX)."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Output(Protocol):
    """Takes the bytes of an archive in order."""

    name: str

    def write(self, parts: Sequence[Bytes]) -> None:
        """Write bytes behind those before. Raises: StorageError."""

    def commit(self) -> None:
        """Make the archive visible and durable. Raises: StorageError; UsageError."""

    def close(self) -> None:
        """Discard what is not committed; a second call does nothing."""


class PipeOutput:
    """An open pipe, or another file that is written forward only. It stays open."""

    def __init__(self, pipe: BinaryIO) -> None:
        self.name = f"the pipe {pipe.name}"
        self._fd = pipe.fileno()

    def write(self, parts: Sequence[Bytes]) -> None:
        """See `Output`."""
        _write_all(self._fd, parts, self.name)

    def commit(self) -> None:
        """See `Output`: a pipe has nothing to commit."""

    def close(self) -> None:
        """See `Output`."""


class FileOutput:
    """A new file. ``replace``: it may take the place of another."""

    def __init__(self, path: str | os.PathLike[str], *, replace: bool) -> None:
        """Raises: UsageError if the file exists, unless ``replace``; BusyError; StorageError."""
        self.name = os.fspath(path)
        self._path = Path(path)
        self._replaces = replace
        self._check_place()
        self._temporary = self._path.with_name(f".{self._path.name}.saving")
        self._fd = self._opened()

    def _check_place(self) -> None:
        with os_errors("write", self._path):
            if not os.path.lexists(self._path):
                return
            if not self._path.is_file():
                raise StorageError(f"{self._path} is not a regular file", path=self.name)
        if not self._replaces:
            hint = "Choose another name, or replace it: `replace=True`."
            raise UsageError(f"{self._path} already exists", path=self.name, hint=hint)

    def _opened(self) -> int:
        """Return the temporary file, empty and locked."""
        with os_errors("write", self._temporary):
            while True:
                fd = os.open(self._temporary, _FLAGS, FILE_MODE)
                try:
                    if self._locked(fd):
                        os.ftruncate(fd, 0)
                        return fd
                except BaseException:
                    close_quietly(fd)
                    raise
                close_quietly(fd)

    def _locked(self, fd: int) -> bool:
        """Lock the file; return False if another process has just renamed or removed it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"another process is writing {self._path}"
            raise BusyError(message, path=self.name) from error
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(fd), self._temporary.lstat())
        return False

    def write(self, parts: Sequence[Bytes]) -> None:
        """See `Output`."""
        _write_all(self._fd, parts, self.name)

    def commit(self) -> None:
        """See `Output`. Raises: UsageError if another process has made the file meanwhile."""
        with os_errors("write", self._temporary):
            sync(self._fd)
        with os_errors("write", self._path):
            if self._replaces:
                self._temporary.rename(self._path)
            else:
                self._check_place()
                self._name_new()
            sync_folder(self._path.parent)

    def _name_new(self) -> None:
        """Give the file its name, unless another has it."""
        try:
            os.link(self._temporary, self._path)
        except FileExistsError:
            self._check_place()
            raise
        except OSError:  # a file system without links
            self._temporary.rename(self._path)
        else:
            self._temporary.unlink()

    def close(self) -> None:
        """See `Output`."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        with suppress(OSError):
            if os.path.samestat(os.fstat(fd), self._temporary.lstat()):
                self._temporary.unlink()
        close_quietly(fd)


def _write_all(fd: int, parts: Sequence[Bytes], name: str) -> None:
    """Write all parts; interrupted and partial writes go on. Raises: StorageError."""
    views = [memoryview(part) for part in parts]
    with os_errors("write", name):
        for begin in range(0, len(views), _MOST_PARTS):
            some = views[begin : begin + _MOST_PARTS]
            while some:
                count = os.writev(fd, some)
                if count == 0 and any(map(len, some)):
                    raise StorageError(f"can't write {name}: nothing was written", path=name)
                some = _after(some, count)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers without their first ``count`` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []
