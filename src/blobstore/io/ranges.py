"""Readers of ranges: every byte that we did not make is read through one; and files as memory.

A reader knows its size and reads ranges, of memory, of a file, or of a file on a server. Formats
are parsed from readers, so a parser does no I/O of its own. Offsets count from the first byte of
the file.

Reading a page beyond the end of a mapped file raises SIGBUS, which Python can't catch. A file that
was truncated is refused when it is mapped, and whenever a view is asked for. A file that is
truncated while a view is being read can't be noticed.
"""

import mmap
import os
import stat
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol, Self

from blobstore import hashing
from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    ShortReadError,
    StorageError,
    from_os_error,
)
from blobstore.hashing.stage import HashStage
from blobstore.io.workers import Progress, no_progress
from blobstore.names import Digest

MAPPED_FROM = 2**14 + 1
_COARSE_TICK_NS = 10**7
_LONGEST_TICK_NS = 2 * 10**9
_FOLLOWING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class Identity(Protocol):
    """The state of a file: equal for the same state, and hashable."""

    @property
    def key(self) -> str:
        """The identity as a text."""


UNKNOWN_SIZE = 2**63 - 1
"""The size of a file on a server that does not say it, or that sends whole files only."""


class Closing:
    """Closed at the end of a ``with`` block."""

    def close(self) -> None:
        """Close it; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenReader(Closing):
    """A reader of bytes whose number is known, or `UNKNOWN_SIZE`. A context manager."""

    name: str
    size: int
    identity: Identity | None
    """The state of the file when it was opened; None in memory."""
    piece_nbytes = 2**18
    """Bytes that `digest` reads at a time."""
    is_remote = False
    """True if reading takes so long that a part which was read is worth keeping."""

    def fileno(self) -> int | None:
        """Return the descriptor of an open file with these bytes only, to link or clone it.

        None if no file has only these bytes.
        """

    def place(self) -> tuple[int, int] | None:
        """Return the descriptor of an open file, and where the bytes begin in it, to map them.

        None if no file contains them unchanged.
        """
        fd = self.fileno()
        return None if fd is None else (fd, 0)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset``. Raises: as `read`.

        A reader has this method of its own, or `read`.
        """
        buffer[:] = self.read(offset, len(buffer))

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset``. Raises: ShortReadError."""
        self._check(offset, length)  # before the memory is taken
        data = bytearray(length)
        self.readinto(offset, memoryview(data))
        return bytes(data)

    def _check(self, offset: int, length: int) -> None:
        if offset + length > self.size:
            raise self._short(offset, length)

    def _short(self, offset: int, length: int) -> ShortReadError:
        had = f": it had {self.size:,} bytes when opened" if self.size != UNKNOWN_SIZE else ""
        return ShortReadError(
            f"{self.name} ends before byte {offset + length:,}{had}", path=self.name
        )

    def view(self, offset: int, nbytes: int) -> memoryview | None:  # noqa: ARG002  # most are files
        """Return bytes where they lie, if that is memory, for as long as the caller may read them.

        None if they have to be read.
        """
        return None

    def pieces(self, buffer: memoryview, begin: int = 0) -> Iterator[memoryview]:
        """Yield all bytes from ``begin`` on, in views of ``buffer``, each good until the next.

        Raises: as `readinto`.
        """
        for start in range(begin, self.size, len(buffer)):
            piece = buffer[: self.size - start]
            self.readinto(start, piece)
            yield piece

    def digest(self, stage: HashStage | None = None) -> Digest:
        """Return the digest of the bytes, read in pieces.

        ``stage``: where they are hashed together with what other threads read. Raises: as
        `readinto`.
        """
        return Digest((stage or HashStage()).digest(self.size, self.pieces(self._buffer())).hex())

    def _buffer(self) -> memoryview:
        return memoryview(bytearray(min(self.piece_nbytes, max(self.size, 1))))


def in_buffer(chunks: Iterable[bytes], buffer: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of chunks of any size in views of ``buffer``, all full but the last."""
    filled = 0
    for chunk in chunks:
        view = memoryview(chunk)
        while view:
            count = min(len(view), len(buffer) - filled)
            buffer[filled : filled + count] = view[:count]
            filled, view = filled + count, view[count:]
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


class SourceReader(OpenReader):
    """A reader of one file of a source. Reading a file that has changed raises CorruptDataError."""

    identity: Identity
    declared: Digest | None = None
    """The digest of the file's bytes that its server declares."""

    def check_unchanged(self) -> None:
        """Raise CorruptDataError when the file was written to, replaced or removed meanwhile.

        Replies of a server were checked when they arrived.
        """


class BytesReader(OpenReader):
    """A reader over bytes in memory, without a copy of them."""

    identity = None

    def __init__(self, data: bytes | memoryview, name: str = "bytes") -> None:
        self.name = name
        self._data = memoryview(data).cast("B")
        self.size = len(self._data)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        self._check(offset, len(buffer))
        buffer[:] = self._data[offset : offset + len(buffer)]


def fill(fd: int, offset: int, buffer: memoryview) -> int:
    """Fill a buffer from an open file; return the bytes filled: fewer only at its end.

    Raises: OSError.
    """
    filled = 0
    while filled < len(buffer) and (count := os.preadv(fd, [buffer[filled:]], offset + filled)):
        filled += count
    return filled


@dataclass(frozen=True, slots=True)
class Segment:
    """``size`` bytes, which are those of the reader that ``open`` returns, from ``offset`` on."""

    size: int
    open: Callable[[], OpenReader]
    offset: int = 0


class JoinedReader(OpenReader):
    """The bytes of several parts, one after the other. Not safe to share between threads."""

    identity = None

    def __init__(self, name: str, parts: Sequence[Segment]) -> None:
        self.name = name
        self._parts = parts
        *self._begins, self.size = accumulate((part.size for part in parts), initial=0)
        self._current: tuple[int, OpenReader] | None = None

    def readinto(self, offset: int, buffer: memoryview) -> None:
        self._check(offset, len(buffer))
        while len(buffer):
            number = bisect_right(self._begins, offset) - 1  # the last: those before it are empty
            begin, part = self._begins[number], self._parts[number]
            length = min(len(buffer), begin + part.size - offset)
            self._open_part(number).readinto(part.offset + offset - begin, buffer[:length])
            buffer, offset = buffer[length:], offset + length

    def _open_part(self, number: int) -> OpenReader:
        if self._current is None or self._current[0] != number:
            self.close()
            self._current = number, self._parts[number].open()
        return self._current[1]

    def close(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current[1].close()


def is_coarse(time_ns: int) -> bool:
    """Return True for a time in whole ticks of 10 ms: finer clocks give one in ten million times.

    Clocks tick every 2 s on FAT, every 10 ms on exFAT, every second on exfat-fuse, HFS+ and ext3.
    """
    return time_ns % _COARSE_TICK_NS == 0


class FileIdentity:
    """The state of a file: device, inode, size and time of the last write.

    ``key`` adds the time of the last change of any kind: a new link or mode changes the key only. A
    file that was written within the last tick of a coarse clock gets another key every time: a
    write in the same tick would leave its times as they are.
    """

    __slots__ = ("_key", "_rest")

    def __init__(self, status: os.stat_result) -> None:
        self._key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        self._rest: tuple[int | str, ...] = (status.st_ctime_ns,)
        # By the time of change, which no program sets: an archive may have set the time of writing
        # to a whole second.
        if (
            is_coarse(status.st_ctime_ns)
            and abs(time.time_ns() - status.st_mtime_ns) < _LONGEST_TICK_NS
        ):
            self._rest += (os.urandom(16).hex(),)

    @property
    def key(self) -> str:
        return " ".join(map(str, self._key + self._rest))

    @property
    def mtime_ns(self) -> int:
        return self._key[3]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileIdentity) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class FileReader(SourceReader):
    """A reader over one open regular file, by ``pread``: safe to share between threads.

    ``follow``: the path may be a symbolic link, as in the Hugging Face cache, but not in a store.
    Opening never blocks on a FIFO or a device.
    """

    identity: FileIdentity

    def __init__(self, path: str | os.PathLike[str], *, follow: bool = True) -> None:
        self.name = os.fspath(path)
        try:
            self._fd = os.open(self.name, _FOLLOWING if follow else _FOLLOWING | os.O_NOFOLLOW)
        except OSError as error:
            raise from_os_error(error, "open", self.name) from error
        except ValueError as error:  # a NUL in the path
            raise StorageError(f"can't open {self.name!r}: {error}", path=self.name) from error
        try:
            status = self.status()
            if not stat.S_ISREG(status.st_mode):
                raise StorageError(f"{self.name} is not a regular file", path=self.name)
        except BlobStoreError:
            self.close()
            raise
        self.size = status.st_size
        self.identity = FileIdentity(status)

    def fileno(self) -> int:
        return self._fd

    def status(self) -> os.stat_result:
        try:
            return os.fstat(self._fd)
        except OSError as error:
            raise from_os_error(error, "stat", self.name) from error

    def settle(self) -> None:
        """Write the file's dirty pages, so that every later write changes the file's times.

        A store through a map changes them only when its page was clean. Errors are ignored: nothing
        of ours has to become durable here.
        """
        with suppress(OSError):
            os.fsync(self._fd)

    def read_ahead(self) -> None:
        """Tell the kernel that all of the file will be read in order. Errors are ignored."""
        with suppress(OSError, AttributeError):  # macOS has no such call
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        try:
            nbytes = fill(self._fd, offset, buffer)
        except OSError as error:
            raise from_os_error(error, "read", self.name) from error
        if nbytes < len(buffer):
            raise self._short(offset, len(buffer))

    def read(self, offset: int, length: int) -> bytes:
        self._check(offset, length)
        try:  # not by `readinto`: a header may have 100 MB, and would be in memory twice
            data = os.pread(self._fd, length, offset)
        except OSError as error:
            raise from_os_error(error, "read", self.name) from error
        if len(data) == length:
            return data
        rest = bytearray(length - len(data))
        self.readinto(offset + len(data), memoryview(rest))
        return data + rest

    def has_nul(self) -> bool:
        """Return True when the file contains a NUL byte: text has none, and holes are all NUL.

        Reading ends at the first one.
        """
        return any(b"\0" in bytes(piece) for piece in self.pieces(self._buffer()))

    def check_is(self, identity: Identity) -> None:
        """Raise CorruptDataError when the open file has another identity, or was written to since.

        Raises: StorageError when its status can't be read.
        """
        if FileIdentity(self.status()) != identity:
            raise CorruptDataError(f"{self.name} changed while it was read", path=self.name)

    def check_unchanged(self) -> None:
        """Raise CorruptDataError when the path names another file now, or the file was written to.

        Raises: StorageError when that can't be read.
        """
        self.check_is(self.identity)
        try:
            now = FileIdentity(Path(self.name).stat())
        except OSError as error:
            raise from_os_error(error, "find again", self.name) from error
        if now != self.identity:
            raise CorruptDataError(f"{self.name} was replaced while it was read", path=self.name)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_quietly(fd)


def close_quietly(fd: int) -> None:
    """Close a file that was only read or locked. Errors are ignored: nothing can be lost."""
    try:  # noqa: SIM105  # `suppress` takes longer than the call
        os.close(fd)
    except OSError:
        pass


def real_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path without links; the file need not exist.

    Raises: StorageError for a link that can't be read, too many links, or a missing current folder.
    """
    try:
        return os.path.realpath(path)
    except OSError as error:
        raise from_os_error(error, "access", path) from error
    except RecursionError:  # Python follows links without the system's limit of 40, by recursion
        raise StorageError(
            f"can't access {path}: too many symbolic links", path=os.fspath(path)
        ) from None


def is_mapped(nbytes: int) -> bool:
    """Return True if `MappedFile` maps a file of that size; a smaller file is read into memory.

    A map takes a descriptor, of which a process may have 1,024 to a million, and Linux allows
    65,530 maps (vm.max_map_count). A model may have 110,000 blobs.
    """
    return nbytes >= MAPPED_FROM


class MappedFile:
    """The bytes of an open file as memory, read-only, mapped for as long as a view of them lives.

    A small file (`is_mapped`) is read into memory, and so is a reader that has no `place`. Of a
    range of a file, only its pages are mapped.
    """

    __slots__ = ("_end", "_map", "_memory", "_name", "size")

    def __init__(self, reader: OpenReader) -> None:
        """Map the file that ``reader`` has open; it may be closed then.

        Raises: CorruptDataError, StorageError.
        """
        self._name = reader.name
        self.size = reader.size
        self._map: mmap.mmap | None = None
        place = reader.place() if is_mapped(reader.size) else None
        if place is None:
            self._memory = memoryview(reader.read(0, reader.size))
            return
        fd, start = place
        begin, self._end = start % mmap.ALLOCATIONGRANULARITY, start + reader.size
        try:
            self._map = mmap.mmap(
                fd, begin + reader.size, access=mmap.ACCESS_READ, offset=start - begin
            )
        except ValueError:  # mmap checks the size of the open file once more
            raise self._short() from None
        except OSError as error:
            raise from_os_error(error, "map", self._name) from error
        self._memory = memoryview(self._map)[begin:]

    def view(self, begin: int = 0, end: int | None = None) -> memoryview:
        """Return the bytes from ``begin`` to ``end`` without a copy.

        Raises: CorruptDataError when the file was cut.
        """
        if self._map is not None:
            try:
                now = self._map.size()
            except OSError as error:
                raise from_os_error(error, "stat", self._name) from error
            if now < self._end:
                raise self._short()
        return self._memory[begin:end]

    def _short(self) -> CorruptDataError:
        return CorruptDataError(
            f"{self._name} was truncated: it had {self.size:,} bytes when opened", path=self._name
        )


# Bytes of all files that are read at a time: as much as a core's own cache holds.
_TOGETHER = 2**21
# Bytes of one file that are read at a time at least.
_LEAST_PIECE = 2**17


def digests_of(
    readers: Sequence[OpenReader],
    names: Sequence[str] | None = None,
    *,
    progress: Progress = no_progress,
    stop: threading.Event | None = None,
) -> list[Digest | BlobStoreError]:
    """Return the digest of each reader's bytes, or the error of reading them, in their order.

    Any number of files is read at once, each in pieces of one size. ``names``: what ``progress`` is
    told. If ``stop`` is set, reading ends early, and the digests are meaningless.
    """
    streams = [hashing.stream() for _ in readers]
    piece_nbytes = max(_LEAST_PIECE, _TOGETHER // max(len(readers), 1))
    buffers = [memoryview(bytearray(min(piece_nbytes, reader.size))) for reader in readers]
    errors: dict[int, BlobStoreError] = {}
    offset = 0
    active = [number for number, reader in enumerate(readers) if reader.size > 0]
    while active and (stop is None or not stop.is_set()):
        pieces: dict[int, memoryview] = {}
        for number in active:
            piece = buffers[number][: readers[number].size - offset]
            try:
                readers[number].readinto(offset, piece)
            except BlobStoreError as error:
                errors[number] = error
            else:
                pieces[number] = piece
        hashing.update_all([streams[number] for number in pieces], list(pieces.values()))
        for number, piece in pieces.items():
            progress(len(piece), names[number] if names else "")
        offset += piece_nbytes
        active = [number for number in pieces if readers[number].size > offset]
    return [
        errors.get(number) or Digest(stream.digest().hex()) for number, stream in enumerate(streams)
    ]
