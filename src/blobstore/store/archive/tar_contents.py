"""The bytes of a tar: in a plain file, in frames of zstandard with a seek table, or in a stream.

A plain file is read at any place and can be mapped. Frames with a seek table are decompressed one
by one. Everything else is a stream that is read forward: a pipe, a compressed file without a seek
table, or one with frames of more than 64 MiB. The stream of a file can begin again, a pipe can't.

Memory is bounded: no more than a frame, or a window of 128 MiB, is decompressed at once. Work is
bounded, too: a stream gives at most 4 GiB and 200 times its compressed bytes, however often it
begins again. Weights compress to half of their size at best, so that is a hundred passes.
"""

from __future__ import annotations

import gzip
import os
import zlib
from bisect import bisect_right
from collections.abc import Callable
from typing import IO, BinaryIO, Protocol

from blobstore.errors import (
    CorruptDataError,
    LimitExceededError,
    ShortReadError,
    UsageError,
    from_os_error,
)
from blobstore.formats.seekable import FRAME_MAGIC
from blobstore.io.durable import os_errors
from blobstore.io.ranges import FileReader, OpenReader
from blobstore.store.packed.frames import (
    FramesReader,
    ZstdFrames,
    broken,
    decompressor,
    seek_table,
)

_GZIP_MAGIC = b"\x1f\x8b"
_SKIPPED_AT_ONCE = 2**20
_MAX_PLAIN = 2**32
_MAX_RATIO = 200


class Contents(Protocol):
    """The bytes of a tar."""

    name: str
    in_sequence: bool
    """True if reading forward is all that is possible, or all that is fast."""
    is_pipe: bool
    """True if no byte can be read twice."""

    @property
    def size(self) -> int | None:
        """Bytes of the tar; None if its size is not known before its end."""

    def read_at(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset``; return the bytes filled: fewer only at the end.

        Raises: CorruptDataError for bytes that can't be decompressed; StorageError; UsageError for
        bytes of a pipe that were read before.
        """

    def range(self, offset: int, size: int, name: str) -> OpenReader:
        """Return a reader of a range. Its ``name`` is for messages."""

    def close(self) -> None:
        """Close it; a second call does nothing."""


class Range(OpenReader):
    """A range of a tar: one file of it."""

    identity = None

    def __init__(self, contents: Contents, offset: int, size: int, name: str) -> None:
        self.name = name
        self.size = size
        self._contents = contents
        self._offset = offset

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See `OpenReader`. Raises: ShortReadError beyond the end of the range, or of the tar."""
        self._check(offset, len(buffer))
        if self._contents.read_at(self._offset + offset, buffer) < len(buffer):
            raise ShortReadError(f"{self.name}: {self._contents.name} was cut", path=self.name)


class _PlainRange(Range):
    """A range of a plain file, which can be mapped."""

    def __init__(self, file: FileReader, contents: Contents, *where: int, name: str) -> None:
        offset, size = where
        super().__init__(contents, offset, size, name)
        self._file = file

    def place(self) -> tuple[int, int]:
        """See `OpenReader`. Raises: UsageError when the archive is closed."""
        if (fd := self._file.fileno()) < 0:  # mmap would take it for no file, and give zeros
            raise UsageError(f"{self._file.name} is closed")
        return fd, self._offset


class PlainContents:
    """A tar in a plain file."""

    in_sequence = is_pipe = False

    def __init__(self, file: FileReader) -> None:
        self.name = file.name
        self.size = file.size
        self._file = file

    def read_at(self, offset: int, buffer: memoryview) -> int:
        """See `Contents`."""
        length = max(0, min(len(buffer), self.size - offset))
        self._file.readinto(offset, buffer[:length])
        return length

    def range(self, offset: int, size: int, name: str) -> OpenReader:
        """See `Contents`."""
        return _PlainRange(self._file, self, offset, size, name=name)

    def close(self) -> None:
        """See `Contents`."""
        self._file.close()


class FramedContents:
    """A tar in frames of zstandard, whose seek table says where each begins."""

    in_sequence = is_pipe = False

    def __init__(self, name: str, frames: ZstdFrames) -> None:
        self.name = name
        self.starts = frames.starts
        self.size = frames.starts[-1]
        self.close = frames.close
        self._frames = frames
        self._recent = -1, b""
        self._reader = FramesReader(self, name)

    def read_at(self, offset: int, buffer: memoryview) -> int:
        """See `Contents`. Of a frame's beginning, such as a header, no more is decompressed."""
        number = bisect_right(self.starts, offset) - 1
        if offset == self.starts[number] and offset + len(buffer) < self.size:
            head = self._frames.head(number, len(buffer))
            if len(head) == len(buffer):
                buffer[:] = head
                return len(buffer)
        length = max(0, min(len(buffer), self.size - offset))
        self._reader.readinto(offset, buffer[:length])
        return length

    def decoded(self, number: int) -> bytes:
        """See `Frames`; the last frame is kept, as many small files may be in it."""
        kept, data = self._recent
        if kept != number:
            data = self._frames.decoded(number)
            self._recent = number, data
        return data

    def range(self, offset: int, size: int, name: str) -> OpenReader:
        """See `Contents`."""
        return _FramedRange(self, offset, size, name)


class _FramedRange(Range):
    """A range of frames. It keeps the frame that it read last, so threads do not disturb others."""

    def __init__(self, contents: FramedContents, offset: int, size: int, name: str) -> None:
        super().__init__(contents, offset, size, name)
        self._reader = FramesReader(contents, contents.name)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See `OpenReader`."""
        self._check(offset, len(buffer))
        self._reader.readinto(self._offset + offset, buffer)


class StreamedContents:
    """A tar that is read forward, plain or compressed.

    ``begin`` opens the file, and opens it again for a byte before those that were read. ``size``:
    the bytes of the tar, if a seek table says so.
    """

    in_sequence = True

    def __init__(
        self, name: str, begin: Callable[[], IO[bytes]], *, is_pipe: bool, size: int | None = None
    ) -> None:
        self.name = name
        self.is_pipe = is_pipe
        self.size = size
        self._begin = begin
        self._taken = self._given = 0
        self._open()

    def _open(self) -> None:
        self._source = _Source(self._begin(), self.name)
        self._stream = _decompressing(self._source)
        self._at = 0

    def read_at(self, offset: int, buffer: memoryview) -> int:
        """See `Contents`."""
        if offset < self._at:
            self._restart()
        while self._at < offset:
            if not self._read(min(_SKIPPED_AT_ONCE, offset - self._at)):
                return 0
        filled = 0
        while filled < len(buffer) and (data := self._read(len(buffer) - filled)):
            buffer[filled : filled + len(data)] = data
            filled += len(data)
        return filled

    def _read(self, most: int) -> bytes:
        import zstandard

        try:
            data = self._stream.read(most)
        except (zstandard.ZstdError, zlib.error, EOFError, gzip.BadGzipFile) as error:
            raise broken(self.name, error) from error
        except OSError as error:
            raise from_os_error(error, "read", self.name) from error
        self._at += len(data)
        self._given += len(data)
        self._check_given()
        if self.size is not None and (self._at > self.size or (not data and self._at < self.size)):
            raise CorruptDataError(
                f"{self.name}: not a valid seek table: it says {self.size:,} bytes (rule A3)",
                rule="A3",
                path=self.name,
            )
        return data

    def _check_given(self) -> None:
        self._taken = max(self._taken, self._source.taken)
        limit = _MAX_PLAIN + _MAX_RATIO * self._taken
        if self._given > limit:
            raise LimitExceededError(
                f"limit exceeded: {self.name}: more than {limit:,} bytes were decompressed from"
                f" {self._taken:,}",
                rule="A1",
                path=self.name,
                hint="Decompress it, or save it again with blobstore save.",
            )

    def _restart(self) -> None:
        if self.is_pipe:
            message = (
                f"{self.name}: the files of the archive are in an order that a pipe can't have"
            )
            raise UsageError(message, hint="Write the archive to a file, and load that.")
        self.close()
        self._open()

    def range(self, offset: int, size: int, name: str) -> OpenReader:
        """See `Contents`."""
        return Range(self, offset, size, name)

    def close(self) -> None:
        """See `Contents`."""
        self._stream.close()
        self._source.close()


def contents_of(path: str | os.PathLike[str]) -> Contents:
    """Return the tar in a file; the first bytes tell whether it is compressed.

    Raises: NotFoundError; CorruptDataError for a seek table that is not valid; StorageError.
    """
    file = FileReader(path)
    try:
        magic = file.read(0, min(4, file.size))
        table = seek_table(file) if magic == FRAME_MAGIC else None
        if table is not None and table.has_small_frames:
            return FramedContents(file.name, ZstdFrames(file, table))
        if magic != FRAME_MAGIC and not magic.startswith(_GZIP_MAGIC):
            return PlainContents(file)
    except BaseException:
        file.close()
        raise
    file.close()

    def begin() -> IO[bytes]:
        with os_errors("open", path):
            return open(path, "rb")  # noqa: PTH123  # `StreamedContents` closes it

    size = None if table is None else table.starts[-1]
    return StreamedContents(os.fspath(path), begin, is_pipe=False, size=size)


def contents_of_pipe(pipe: BinaryIO, name: str) -> Contents:
    """Return the tar that comes through a pipe, compressed or not. Raises: StorageError."""
    return StreamedContents(name, lambda: pipe, is_pipe=True)


class _Source:
    """A file whose bytes are counted as they are read. ``magic``: the first four."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self.close = file.close
        with os_errors("read", name):
            self.magic = self._ahead = file.read(4)
        self.taken = len(self.magic)

    def read(self, most: int) -> bytes:
        """Return at most ``most`` bytes, no bytes at the end."""
        if self._ahead:
            data, self._ahead = self._ahead[:most], self._ahead[most:]
            return data
        data = self._file.read(most)
        self.taken += len(data)
        return data


def _decompressing(source: _Source) -> IO[bytes]:
    """Return a stream of the plain bytes of an open file."""
    file: IO[bytes] = source  # type: ignore[assignment]  # what `read` needs
    if source.magic == FRAME_MAGIC:
        return decompressor().stream_reader(file, read_across_frames=True)
    if source.magic.startswith(_GZIP_MAGIC):
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]  # as above
    return file
