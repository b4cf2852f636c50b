"""A temporary file of blobs whose repository is not known yet, or that are written in any order.

It has no name on the disk, so that a killed process leaves nothing.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

from blobstore.hashing.stage import HashStage
from blobstore.io.durable import os_errors, write_all_at
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.names import Digest

_PIECE = 2**20


class Spool:
    """Blobs one after the other in one file. Safe to share between threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._file: IO[bytes] | None = None
        self._end = 0

    def reserve(self, size: int) -> SpooledBlob:
        """Return the place of a blob that is written then. Raises: StorageError."""
        with self._mutex, os_errors("create", "a temporary file"):
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the spool
            begin, self._end = self._end, self._end + size
            return SpooledBlob(self._file.fileno(), begin, size)

    def keep(self, reader: OpenReader) -> SpooledBlob:
        blob, at = self.reserve(reader.size), 0
        for piece in reader.pieces(memoryview(bytearray(_PIECE))):
            blob.write(at, piece)
            at += len(piece)
        return blob

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class SpooledBlob(OpenReader):
    """One blob of a `Spool`."""

    identity = None
    name = "a temporary file"

    def __init__(self, fd: int, begin: int, size: int) -> None:
        self._fd = fd
        self._begin = begin
        self.size = size

    def write(self, offset: int, data: Any) -> None:
        with os_errors("write", self.name):
            write_all_at(self._fd, self._begin + offset, memoryview(data).cast("B"))

    def readinto(self, offset: int, buffer: memoryview) -> None:
        self._check(offset, len(buffer))
        while buffer:
            with os_errors("read", self.name):
                count = os.preadv(self._fd, [buffer], self._begin + offset)
            if not count:
                raise self._short(offset, len(buffer))
            buffer, offset = buffer[count:], offset + count


class MemoryBlob(BytesReader):
    """A blob in memory that is written in any order."""

    def write(self, offset: int, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._data[offset : offset + len(view)] = view


class SpoolWriter:
    """Writes one blob. See `Writer`. It is hashed at its end."""

    def __init__(self, blob: SpooledBlob | MemoryBlob, finished: Callable[[Digest], None]) -> None:
        self._blob = blob
        self._finished = finished
        self._written = 0
        self._mutex = threading.Lock()

    def put(
        self,
        offset: int,
        data: Any,
        *,
        beside: Sequence[tuple[int, Any]] = (),
        gap: int = 0,
        aligned: bool = False,  # noqa: ARG002  # through the page cache
        waits: bool = True,  # noqa: ARG002  # no buffer waits
        hashed: Callable[[], None] = lambda: None,
    ) -> None:
        for at, part in (*beside, (offset, data)):
            self._blob.write(at, part)
        hashed()
        with self._mutex:
            self._written += memoryview(data).nbytes + gap
            is_complete = self._written == self._blob.size
        if is_complete:
            self._finished(self._blob.digest(HashStage()))

    def release(self) -> None:
        """Do nothing: no buffer waits."""

    close = release
