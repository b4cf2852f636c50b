"""The bytes of a tar, and the files in it, found by reading its headers from one to the next.

A plain file is read at any place and can be mapped. Frames with a seek table are decompressed one
by one. Everything else is a stream that is read forward: a pipe, a compressed file without a seek
table, or one with frames of more than 64 MiB. The stream of a file can begin again, a pipe can't.

Memory is bounded: no more than a frame, or a window of 128 MiB, is decompressed at once. Work is
bounded, too: a stream gives at most 4 GiB and 200 times its compressed bytes, however often it
begins again. Weights compress to half of their size at best, so that is a hundred passes.

Python's tarfile is not used. It accepts what rule A1 refuses (links, devices, sparse files, a file
that is cut after its last header), ends quietly at a damaged header, keeps a dictionary for each of
100,000 members, and can't begin in the middle of frames.
"""

from __future__ import annotations

import gzip
import os
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import IO, BinaryIO

from blobstore.errors import (
    CorruptDataError,
    LimitExceededError,
    ShortReadError,
    UsageError,
    from_os_error,
)
from blobstore.formats.seekable import FRAME_MAGIC
from blobstore.formats.tar import (
    BLOCK,
    MAX_EXTENSION,
    Member,
    TarHeader,
    extended,
    in_blocks,
    parse_block,
    parse_extension,
    path_of,
)
from blobstore.io.durable import os_errors
from blobstore.io.ranges import FileReader, OpenReader
from blobstore.store.packed.files import (
    Frames,
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
MAX_MEMBERS = 400_000
"""Headers of an archive: of files, of folders, and of extensions before them."""
_MAX_EXTENSIONS = 2**24
"""Bytes of all PAX records and long paths; paths of over 100 bytes have some."""
MAX_PATHS = 2**27
"""Bytes of all paths, which are held in memory: a compressed archive has room for gigabytes."""
_MAX_PADDING = 2**20
"""Zeros after the end: tar fills its last record, of 10 KiB unless another size is asked for."""
_READ_AT_ONCE = 2**16


class Contents:
    """The bytes of a tar in a file, which are read at any place."""

    in_sequence = False
    """True if reading forward is all that is possible, or all that is fast."""
    is_pipe = False
    """True if no byte can be read twice."""
    size: int | None
    """Bytes of the tar; None if its size is not known before its end."""

    def __init__(self, whole: OpenReader) -> None:
        self.name = whole.name
        self.size = whole.size
        self._whole = whole

    def read_at(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset``; return the bytes filled: fewer only at the end.

        Raises: CorruptDataError for bytes that can't be decompressed; StorageError; UsageError for
        bytes of a pipe that were read before.
        """
        length = max(0, min(len(buffer), self._whole.size - offset))
        self._whole.readinto(offset, buffer[:length])
        return length

    def place(self) -> tuple[int, int] | None:
        """See `OpenReader`. Raises: UsageError when the archive is closed."""
        place = self._whole.place()
        if place is not None and place[0] < 0:  # mmap would take it for no file, and give zeros
            raise UsageError(f"{self.name} is closed")
        return place

    def for_range(self) -> Contents:
        """Return the same for one range, which a thread reads."""
        return self

    def close(self) -> None:
        """Close it; a second call does nothing."""
        self._whole.close()


class FramedContents(Contents):
    """A tar in frames of zstandard, whose seek table says where each begins; for one thread."""

    def __init__(self, name: str, frames: Frames, head: Callable[[int, int], bytes]) -> None:
        super().__init__(FramesReader(frames, name))
        self._frames = frames
        self._head = head

    def read_at(self, offset: int, buffer: memoryview) -> int:
        """See `Contents`. Of a frame that begins with a header, no more is decompressed."""
        if len(buffer) == BLOCK:
            number = bisect_right(self._frames.starts, offset) - 1
            if offset == self._frames.starts[number] < self._frames.starts[-1]:
                head = self._head(number, BLOCK)
                if len(head) == BLOCK:
                    buffer[:] = head
                    return BLOCK
        return super().read_at(offset, buffer)

    def for_range(self) -> Contents:
        return FramedContents(self.name, self._frames, self._head)


class StreamedContents(Contents):
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

    def place(self) -> None:
        """See `OpenReader`."""

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
        self._taken = max(self._taken, self._source.taken)
        if self._given > (limit := _MAX_PLAIN + _MAX_RATIO * self._taken):
            raise LimitExceededError(
                f"limit exceeded: {self.name}: more than {limit:,} bytes were decompressed from"
                f" {self._taken:,}",
                rule="A1",
                path=self.name,
                hint="Decompress it, or save it again with blobstore save.",
            )
        if self.size is not None and (self._at > self.size or (not data and self._at < self.size)):
            raise CorruptDataError(
                f"{self.name}: not a valid seek table: it says {self.size:,} bytes (rule A3)",
                rule="A3",
                path=self.name,
            )
        return data

    def _restart(self) -> None:
        if self.is_pipe:
            message = (
                f"{self.name}: the files of the archive are in an order that a pipe can't have"
            )
            raise UsageError(message, hint="Write the archive to a file, and load that.")
        self.close()
        self._open()

    def close(self) -> None:
        self._stream.close()
        self._source.close()


class Range(OpenReader):
    """A range of a tar: one file of it. ``at_end`` is called when its last byte was read."""

    identity = None

    def __init__(
        self,
        contents: Contents,
        offset: int,
        size: int,
        name: str,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.size = size
        self._contents = contents.for_range()
        self._offset = offset
        self._at_end = at_end
        if size == 0:
            at_end()

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See `OpenReader`. Raises: ShortReadError beyond the end of the range, or of the tar."""
        self._check(offset, len(buffer))
        if self._contents.read_at(self._offset + offset, buffer) < len(buffer):
            raise ShortReadError(f"{self.name}: {self._contents.name} was cut", path=self.name)
        if offset + len(buffer) == self.size:
            self._at_end()

    def place(self) -> tuple[int, int] | None:
        place = self._contents.place()
        return place and (place[0], self._offset)


def contents_of(path: str | os.PathLike[str]) -> Contents:
    """Return the tar in a file; the first bytes tell whether it is compressed.

    Raises: NotFoundError; CorruptDataError for a seek table that is not valid; StorageError.
    """
    file = FileReader(path)
    try:
        magic = file.read(0, min(4, file.size))
        table = seek_table(file) if magic == FRAME_MAGIC else None
        if table is not None and table.has_small_frames:
            whole = ZstdFrames(file, table)
            # Many small files may be in one frame.
            frames = Frames(table.starts, lru_cache(maxsize=1)(whole.decoded), file.close)
            return FramedContents(file.name, frames, whole.head)
        if magic != FRAME_MAGIC and not magic.startswith(_GZIP_MAGIC):
            return Contents(file)
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


class Members:
    """The files of a tar by path, each found when it is needed. Not safe between threads."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._what = contents.name
        self._found: dict[str, Member] = {}
        self._path_bytes = 0
        self._extension_bytes = 0
        self._headers = 0
        self._at = 0
        self._is_complete = False
        self._block = memoryview(bytearray(BLOCK))

    def find(self, path: str) -> Member | None:
        """Return a file; None if the archive has no file of that path.

        Headers are read until it is found. Raises: as `all`.
        """
        while path not in self._found and not self._is_complete:
            self._next()
        return self._found.get(path)

    def all(self) -> Mapping[str, Member]:
        """Return all files, and check the archive's end.

        Raises: CorruptDataError (rule A1) for a header that is not valid, a path twice, a missing
        end, data after the end; LimitExceededError for more than 400,000 headers, 128 MiB of
        paths, or 16 MiB of extensions; StorageError.
        """
        while not self._is_complete:
            self._next()
        return self._found

    def _next(self) -> None:
        header = self._header()
        if header is None:
            self._check_end()
            self._is_complete = True
            return
        path = path_of(header, self._what)
        member = Member(path or "", self._at, header.size)
        if self._contents.size is not None and member.offset + member.size > self._contents.size:
            raise self._invalid(f"{path!r} has {header.size:,} bytes, more than are left")
        if path is not None:
            self._add(member)
        self._at = member.end

    def _add(self, member: Member) -> None:
        if member.path in self._found:
            raise self._invalid(f"{member.path!r} appears twice")
        self._path_bytes += len(member.path.encode())
        if self._path_bytes > MAX_PATHS:
            raise self._too_much(f"{MAX_PATHS:,} bytes of paths")
        self._found[member.path] = member

    def _header(self) -> TarHeader | None:
        """Return the next file's header, extensions included; None at the end."""
        path: str | None = None
        size: int | None = None
        is_extended = False
        while (header := self._block_at()) is not None and header.extends:
            if header.size > MAX_EXTENSION:
                raise self._invalid("a path or PAX records of more than 1 MiB")
            self._extension_bytes += header.size
            if self._extension_bytes > _MAX_EXTENSIONS:
                raise self._too_much(f"{_MAX_EXTENSIONS:,} bytes of PAX records and long paths")
            data = memoryview(bytearray(header.size))
            if self._contents.read_at(self._at, data) < len(data):
                raise self._invalid("it ends early")
            self._at += in_blocks(header.size)
            said_path, said_size = parse_extension(header, bytes(data), self._what)
            path, size = said_path or path, size if said_size is None else said_size
            is_extended = is_extended or header.kind != b"g"
        if header is None and is_extended:
            raise self._invalid("it ends after an extension")
        return header and extended(header, (path, size), self._what)

    def _block_at(self) -> TarHeader | None:
        if self._contents.read_at(self._at, self._block) < BLOCK:
            raise self._invalid("it ends early")
        self._at += BLOCK
        self._headers += 1
        if self._headers > MAX_MEMBERS:
            raise self._too_much(f"{MAX_MEMBERS:,} headers of files, folders and extensions")
        return parse_block(bytes(self._block), self._what)

    def _check_end(self) -> None:
        """Raise CorruptDataError unless another block of zeros follows, and only zeros."""
        end = self._at
        buffer = memoryview(bytearray(_READ_AT_ONCE))
        while nbytes := self._contents.read_at(self._at, buffer):
            self._at += nbytes
            if any(buffer[:nbytes]) or self._at - end > _MAX_PADDING:
                raise self._invalid("data follow its end")
        if self._at - end < BLOCK:
            raise self._invalid("it ends early")

    def _too_much(self, limit: str) -> LimitExceededError:
        message = f"limit exceeded: {self._what} has more than {limit}"
        return LimitExceededError(message, rule="A1", path=self._what)

    def _invalid(self, reason: str) -> CorruptDataError:
        message = f"{self._what}: not a valid archive: {reason} (rule A1)"
        return CorruptDataError(message, rule="A1", path=self._what)
