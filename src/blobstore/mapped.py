"""MappedFile: a file's bytes as memory, and the checks that keep a file which shrinks from ending the process.

Reading a page beyond the end of a mapped file raises SIGBUS, which Python can't catch. A file that is shorter than it was is
noticed before it is mapped, and whenever a view is asked for; what is truncated while a view is being read is not.
"""

from __future__ import annotations

import mmap

from blobstore.errors import CorruptDataError, from_os_error
from blobstore.ranges import FileReader


class MappedFile:
    """The bytes of an open file, read-only and private to the process. It lives as long as a view of it does."""

    __slots__ = ("_data", "_name", "size")

    def __init__(self, reader: FileReader) -> None:
        """Map the file that ``reader`` has open; it may be closed then. Raises: CorruptDataError, StorageError."""
        self._name = reader.name
        self.size = reader.size
        try:
            self._data = mmap.mmap(reader.fileno(), reader.size, access=mmap.ACCESS_READ) if reader.size else None
        except ValueError:  # mmap checks the size of the open file once more
            raise self._short() from None
        except OSError as error:
            raise from_os_error(error, "map", self._name) from error

    def view(self, begin: int = 0, end: int | None = None) -> memoryview:
        """Return the bytes from ``begin`` to ``end`` without a copy. Raises: CorruptDataError when the file was cut."""
        if self._data is None:
            return memoryview(b"")
        try:
            now = self._data.size()
        except OSError as error:
            raise from_os_error(error, "look at", self._name) from error
        if now < self.size:
            raise self._short()
        return memoryview(self._data)[begin:end]

    def _short(self) -> CorruptDataError:
        message = f"{self._name} was cut since it was opened: it had {self.size:,} bytes"
        return CorruptDataError(message, path=self._name)
