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
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import IO, TYPE_CHECKING, BinaryIO, Protocol

from blobstore.errors import (
    CorruptDataError,
    LimitExceededError,
    ShortReadError,
    UsageError,
    from_os_error,
)
from blobstore.formats.seekable import FOOTER_BYTES, FRAME_MAGIC, parse_footer, parse_table
from blobstore.io.durable import os_errors
from blobstore.io.ranges import FileReader, OpenReader

if TYPE_CHECKING:
    from zstandard import ZstdDecompressor

_GZIP_MAGIC = b"\x1f\x8b"
_SKIPPED_AT_ONCE = 2**20
_MAX_WINDOW = 2**27
_MAX_FRAME = 2**26
_MAX_PLAIN = 2**32
_MAX_RATIO = 200
_MAX_TABLE = 2**24
"""Bytes of a seek table: of 4 TB, or of two million files. A longer one is not used."""


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
        if offset + len(buffer) > self.size:
            raise ShortReadError(f"{self.name} ends before byte {offset + len(buffer):,}")
        if self._contents.read_at(self._offset + offset, buffer) < len(buffer):
            raise ShortReadError(f"{self.name}: {self._contents.name} was cut", path=self.name)

    def read(self, offset: int, length: int) -> bytes:
        """See `OpenReader`."""
        if offset + length > self.size:  # before the memory is taken
            raise ShortReadError(f"{self.name} ends before byte {offset + length:,}")
        data = bytearray(length)
        self.readinto(offset, memoryview(data))
        return bytes(data)


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


class _Frame:
    """The last frame that was decompressed."""

    def __init__(self) -> None:
        self.number = -1
        self.data = b""


class FramedContents:
    """A tar in frames of zstandard, whose seek table says where each begins."""

    in_sequence = is_pipe = False

    def __init__(self, file: FileReader, places: Sequence[int], starts: Sequence[int]) -> None:
        """``places``, ``starts``: see `parse_table`."""
        self.name = file.name
        self.size = starts[-1]
        self._file = file
        self._at = places
        self._starts = starts
        self._last = _Frame()
        self._recent = -1, b""

    def read_at(self, offset: int, buffer: memoryview) -> int:
        """See `Contents`. Of a frame's beginning, such as a header, no more is decompressed."""
        number = bisect_right(self._starts, offset) - 1
        if offset == self._starts[number] and offset + len(buffer) < self.size:
            head = self._head(number, len(buffer))
            if len(head) == len(buffer):
                buffer[:] = head
                return len(buffer)
        return self.fill(offset, buffer, self._last)

    def fill(self, offset: int, buffer: memoryview, last: _Frame) -> int:
        """Fill ``buffer`` as `read_at` does, by whole frames; ``last`` keeps the last one."""
        filled = 0
        while filled < len(buffer) and offset + filled < self.size:
            number = bisect_right(self._starts, offset + filled) - 1
            if number != last.number:
                last.number, last.data = number, self._frame(number)
            begin = offset + filled - self._starts[number]
            piece = memoryview(last.data)[begin : begin + len(buffer) - filled]
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        return filled

    def _frame(self, number: int) -> bytes:
        """Return a frame's bytes; the last one is kept, as many small files may be in it."""
        kept, data = self._recent
        if kept != number:
            data = self._decompressed(number)
            self._recent = number, data
        return data

    def _compressed(self, number: int, most: int | None = None) -> bytes:
        nbytes = self._at[number + 1] - self._at[number]
        return self._file.read(self._at[number], nbytes if most is None else min(most, nbytes))

    def _head(self, number: int, length: int) -> bytes:
        """Return the first bytes of a frame, fewer if that would need most of it."""
        import zstandard

        first_block = self._compressed(number, 2**17 + 2**10)
        try:
            with _decompressor().stream_reader(first_block) as reader:
                return reader.read(length)
        except zstandard.ZstdError as error:
            raise _broken(self.name, error) from error

    def _decompressed(self, number: int) -> bytes:
        import zstandard

        size = self._starts[number + 1] - self._starts[number]
        data = self._compressed(number)
        try:
            said = zstandard.frame_content_size(data)
            # Before the memory is taken: the library trusts the frame's header.
            if said not in (-1, size):
                raise CorruptDataError(f"{self.name}: a frame has {said:,} bytes, not {size:,}")
            plain = _decompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise _broken(self.name, error) from error
        if len(plain) != size:
            raise CorruptDataError(f"{self.name}: a frame has {len(plain):,} bytes, not {size:,}")
        return plain

    def range(self, offset: int, size: int, name: str) -> OpenReader:
        """See `Contents`."""
        return _FramedRange(self, offset, size, name)

    def close(self) -> None:
        """See `Contents`."""
        self._file.close()


class _FramedRange(Range):
    """A range of frames. It keeps the frame that it read last, so threads do not disturb others."""

    def __init__(self, contents: FramedContents, offset: int, size: int, name: str) -> None:
        super().__init__(contents, offset, size, name)
        self._frames = contents
        self._last = _Frame()

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See `OpenReader`."""
        if offset + len(buffer) > self.size:
            raise ShortReadError(f"{self.name} ends before byte {offset + len(buffer):,}")
        self._frames.fill(self._offset + offset, buffer, self._last)


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
        self._source = _Counted(self._begin())
        self._stream = _decompressing(self._source, self.name)
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
            raise _broken(self.name, error) from error
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
        frames = _seek_table(file) if magic == FRAME_MAGIC else None
        if frames is not None and _are_small(frames[1]):
            return FramedContents(file, *frames)
        if magic != FRAME_MAGIC and not magic.startswith(_GZIP_MAGIC):
            return PlainContents(file)
    except BaseException:
        file.close()
        raise
    file.close()

    def begin() -> IO[bytes]:
        with os_errors("open", path):
            return open(path, "rb")  # noqa: PTH123  # `StreamedContents` closes it

    size = None if frames is None else frames[1][-1]
    return StreamedContents(os.fspath(path), begin, is_pipe=False, size=size)


def contents_of_pipe(pipe: BinaryIO, name: str) -> Contents:
    """Return the tar that comes through a pipe, compressed or not. Raises: StorageError."""
    return StreamedContents(name, lambda: pipe, is_pipe=True)


def _seek_table(file: FileReader) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return where the frames of a file begin, as `parse_table`; None without a table of 16 MiB.

    Raises: CorruptDataError (rule A3).
    """
    if file.size < FOOTER_BYTES:
        return None
    footer = parse_footer(file.read(file.size - FOOTER_BYTES, FOOTER_BYTES), file.name)
    if footer is None or (footer.table_bytes > _MAX_TABLE and footer.table_bytes <= file.size):
        return None
    if footer.table_bytes > file.size:
        raise _false_table(file.name, "it is longer than the file")
    table = file.read(file.size - footer.table_bytes, footer.table_bytes)
    places, starts = parse_table(table, footer, file.size, file.name)
    for (place, next_place), (start, end) in zip(pairwise(places), pairwise(starts), strict=True):
        if next_place - place > _longest(end - start):
            raise _false_table(file.name, f"a frame of {end - start:,} bytes can't take that many")
    return places, starts


def _are_small(starts: Sequence[int]) -> bool:
    """Return True if each frame is small enough to be decompressed as a whole."""
    return all(end - start <= _MAX_FRAME for start, end in pairwise(starts))


def _false_table(name: str, problem: str) -> CorruptDataError:
    message = f"{name}: not a valid seek table: {problem} (rule A3)"
    return CorruptDataError(message, rule="A3", path=name)


def _longest(nbytes: int) -> int:
    """Return the most bytes that a frame of ``nbytes`` may take (zstd.h `ZSTD_compressBound`)."""
    return nbytes + nbytes // 256 + 2**12


class _Ahead:
    """A stream whose first bytes were read to detect its format."""

    def __init__(self, first: bytes, rest: _Counted) -> None:
        self._first = first
        self._rest = rest
        self.close = rest.close

    def read(self, most: int = -1) -> bytes:
        """Return at most ``most`` bytes, no bytes at the end."""
        if self._first:
            data, self._first = self._first[:most], self._first[most:]
            return data
        return self._rest.read(most)


class _Counted:
    """A file whose bytes are counted as they are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.taken = 0
        self.close = file.close

    def read(self, most: int = -1) -> bytes:
        """Return at most ``most`` bytes, no bytes at the end."""
        data = self._file.read(most)
        self.taken += len(data)
        return data


def _decompressing(file: _Counted, name: str) -> IO[bytes]:
    """Return a stream of the plain bytes of an open file."""
    with os_errors("read", name):
        magic = file.read(4)
    ahead: IO[bytes] = _Ahead(magic, file)  # type: ignore[assignment]  # what `read` needs
    if magic == FRAME_MAGIC:
        return _decompressor().stream_reader(ahead, read_across_frames=True)
    if magic.startswith(_GZIP_MAGIC):
        return gzip.GzipFile(fileobj=ahead)  # type: ignore[return-value]  # as above
    return ahead


def _decompressor() -> ZstdDecompressor:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)


def _broken(name: str, error: Exception) -> CorruptDataError:
    return CorruptDataError(f"{name}: can't be decompressed: {error}", path=name)
