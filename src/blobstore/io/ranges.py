"""Readers of ranges, the only way to bytes that we did not make; and files as memory.

A reader knows its size and reads ranges; where the bytes lie (memory, a file, a server) is its own
business. Formats are parsed from readers, so a parser does no I/O of its own. Offsets count from
the first byte of the file.

Reading a page beyond the end of a mapped file raises SIGBUS, which Python can't catch. A file that
is shorter than it was is noticed before it is mapped, and whenever a view is asked for; what is
truncated while a view is being read is not.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

from blobstore.errors import (
    CorruptDataError,
    ShortReadError,
    StorageError,
    from_os_error,
)
from blobstore.names import Digest

_OTHER_FILES = 256
_PIECE = 2**20
_COARSE_TICK_NS = 10**7
_LONGEST_TICK_NS = 2 * 10**9


class RangeReader(Protocol):
    """Bytes with a size. Reading beyond the size is an error, never a short answer."""

    @property
    def name(self) -> str:
        """Path or address, for messages."""

    @property
    def size(self) -> int | None:
        """Bytes of the whole; None where a server does not say."""

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset``.

        Raises: ShortReadError when the data end before it is full.
        """

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset``.

        Raises: ShortReadError when there are fewer.
        """


class Identity(Protocol):
    """What tells one state of a file from another: equal for the same state, and hashable."""

    @property
    def key(self) -> str:
        """The identity as a text."""


class OpenReader(RangeReader, Protocol):
    """A reader of bytes whose number is known, to be closed."""

    @property
    def size(self) -> int:
        """Bytes of the whole."""

    @property
    def identity(self) -> Identity | None:
        """The state of the file when it was opened; None in memory."""

    def fileno(self) -> int | None:
        """Return the descriptor of the open file, which can be mapped, linked and cloned; None in memory."""

    def pieces(self, buffer: memoryview) -> Iterator[memoryview]:
        """Yield all bytes in order, in views of ``buffer``, each good until the next.

        Raises: as `readinto`.
        """

    def digest(self) -> Digest:
        """Return the digest of the bytes. Raises: as `readinto`."""

    def close(self) -> None:
        """Close it; a second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class BytesReader:
    """A reader over bytes in memory."""

    identity = None

    def __init__(self, data: bytes, name: str = "bytes") -> None:
        self.name = name
        self.size = len(data)
        self._data = memoryview(data)

    def fileno(self) -> None:
        """Return None: memory has no descriptor."""

    def pieces(self, buffer: memoryview) -> Iterator[memoryview]:
        """Yield all bytes; nothing is copied, and ``buffer`` is only a measure."""
        for start in range(0, self.size, len(buffer)):
            yield self._data[start : start + len(buffer)]

    def digest(self) -> Digest:
        """Return the digest of the bytes."""
        return Digest.of(self._data)

    def close(self) -> None:
        """Do nothing: memory is given back with the last view of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Copy ``len(buffer)`` bytes from ``offset``."""
        buffer[:] = self._range(offset, len(buffer))

    def read(self, offset: int, length: int) -> bytes:
        """Return a copy of ``length`` bytes from ``offset``."""
        return bytes(self._range(offset, length))

    def _range(self, offset: int, length: int) -> memoryview:
        if offset + length > self.size:
            raise _short(self, offset, length)
        return self._data[offset : offset + length]


class FileReader:
    """A reader over one open regular file, by ``pread``: safe to share between threads.

    ``follow`` says whether the last path segment may be a symbolic link: true for users'
    checkpoints (the Hugging Face cache is made of links), false inside a store. Opening never
    blocks on a FIFO or a device.
    """

    def __init__(self, path: str | os.PathLike[str], *, follow: bool = True) -> None:
        self.name = os.fspath(path)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        try:
            self._fd = os.open(self.name, flags)
        except OSError as error:
            raise from_os_error(error, "open", self.name) from error
        except ValueError as error:  # a NUL in the path
            raise StorageError(f"can't open {self.name!r}: {error}", path=self.name) from error
        try:
            status = os.fstat(self._fd)
        except OSError as error:
            close_quietly(self._fd)
            raise from_os_error(error, "stat", self.name) from error
        if not stat.S_ISREG(status.st_mode):
            close_quietly(self._fd)
            raise StorageError(f"{self.name} is not a regular file", path=self.name)
        self.size = status.st_size
        self.identity = FileIdentity(status)

    def fileno(self) -> int:
        """Return the open file descriptor; it stays ours."""
        return self._fd

    def status(self) -> os.stat_result:
        """Return the open file's status as it is now. Raises: StorageError."""
        try:
            return os.fstat(self._fd)
        except OSError as error:
            raise from_os_error(error, "stat", self.name) from error

    def settle(self) -> None:
        """Let the kernel see every later write to the file: stores through a map show in its times only on a clean page.

        A file system that can't is left alone: what is asked for here is a courtesy, not
        durability.
        """
        with suppress(OSError):
            os.fsync(self._fd)

    def read_ahead(self) -> None:
        """Tell the kernel that the file will be read from its beginning to its end.

        Errors are ignored.
        """
        with suppress(OSError, AttributeError):  # macOS has no such call
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; interrupted and partial reads go on."""
        wanted = len(buffer)
        filled = 0
        while filled < wanted:
            try:
                count = os.preadv(self._fd, [buffer[filled:]], offset + filled)
            except OSError as error:
                raise from_os_error(error, "read", self.name) from error
            if count == 0:
                raise _short(self, offset, wanted)
            filled += count

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset``."""
        if offset + length > self.size:
            raise _short(self, offset, length)
        try:
            data = os.pread(
                self._fd, length, offset
            )  # a header may have 100 MB: it is not held twice
        except OSError as error:
            raise from_os_error(error, "read", self.name) from error
        if len(data) == length:
            return data
        rest = bytearray(length - len(data))
        self.readinto(offset + len(data), memoryview(rest))
        return data + rest

    def pieces(self, buffer: memoryview) -> Iterator[memoryview]:
        """Yield all bytes in order, in views of ``buffer``, each good until the next.

        Raises: as `readinto`.
        """
        for start in range(0, self.size, len(buffer)):
            piece = buffer[: self.size - start]
            self.readinto(start, piece)
            yield piece

    def has_nul(self) -> bool:
        """Return True when the file contains a NUL byte, reading up to the first: text has none, a hole nothing else."""
        return any(
            b"\0" in bytes(piece)
            for piece in self.pieces(memoryview(bytearray(min(_PIECE, max(self.size, 1)))))
        )

    def digest(self) -> Digest:
        """Return the digest of the file's bytes, read in pieces. Raises: as `readinto`."""
        hashed = hashlib.sha256()
        for piece in self.pieces(memoryview(bytearray(min(_PIECE, max(self.size, 1))))):
            hashed.update(piece)
        return Digest(hashed.hexdigest())

    def check_is(self, identity: Identity) -> None:
        """Raise CorruptDataError when the open file is not the one of ``identity``, or was written to since.

        Raises: StorageError when that can't be told.
        """
        if FileIdentity(self.status()) != identity:
            raise CorruptDataError(f"{self.name} changed while it was read", path=self.name)

    def check_unchanged(self) -> None:
        """Raise when the path no longer names the file that was opened, or the file was written to meanwhile."""
        self.check_is(self.identity)
        try:
            now = FileIdentity(Path(self.name).stat())
        except OSError as error:
            raise from_os_error(error, "find again", self.name) from error
        if now != self.identity:
            raise CorruptDataError(f"{self.name} was replaced while it was read", path=self.name)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_quietly(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def close_quietly(fd: int) -> None:
    """Close a file that was only read or locked.

    Errors are ignored: what was read stays right, and the lock is gone.
    """
    with suppress(OSError):
        os.close(fd)


def real_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path without links, of what need not exist.

    Raises: StorageError when a link in it can't be read, there are too many of them, or the current
    folder is gone.
    """
    try:
        return os.path.realpath(path)
    except OSError as error:
        raise from_os_error(error, "access", path) from error
    except RecursionError:  # Python follows links without the system's limit of 40, by recursion
        raise StorageError(
            f"can't access {path}: too many symbolic links", path=os.fspath(path)
        ) from None


def allow_open_files(count: int) -> None:
    """Raise the process's soft limit of open files, where it is too low for ``count`` more, as far as the system allows.

    A dense model of 126 layers has 1,137 blobs, and checkpoints have hundreds of shards, where
    Linux's usual soft limit is 1,024 files and macOS's 256.
    """
    needed = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):  # opening one file too many is a typed error
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def is_coarse(time_ns: int) -> bool:
    """Return True for a time of a clock of 10 ms or more: whole such ticks happen once in ten million times otherwise.

    Clocks tick every 2 s on FAT, every 10 ms on exFAT, every second on exfat-fuse, HFS+ and ext3.
    """
    return time_ns % _COARSE_TICK_NS == 0


class FileIdentity:
    """What tells one state of a file from another: device, inode, size and time of the last write.

    ``key`` is that as a text, with the time of the last change of any kind: a link or a mode
    changes the key only. A file that was written within the last tick of a coarse clock gets
    another key every time: a write in the same tick would leave its times as they are.
    """

    __slots__ = ("_key", "key")

    def __init__(self, status: os.stat_result) -> None:
        self._key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        self.key = " ".join(map(str, (*self._key, status.st_ctime_ns)))
        # By the time of change, which no program sets: an archive may have set the time of writing
        # to a whole second.
        if (
            is_coarse(status.st_ctime_ns)
            and abs(time.time_ns() - status.st_mtime_ns) < _LONGEST_TICK_NS
        ):
            self.key += f" {secrets.token_hex(16)}"

    @property
    def mtime_ns(self) -> int:
        """Time of the last write, which a copy may keep."""
        return self._key[3]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileIdentity) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _short(reader: BytesReader | FileReader, offset: int, length: int) -> ShortReadError:
    return ShortReadError(
        f"{reader.name} ends before byte {offset + length:,}: it had {reader.size:,} when it was opened",
        path=reader.name,
    )


class MappedFile:
    """The bytes of an open file, read-only and private to the process.

    It lives as long as a view of it does.

    Of a reader without a file they are its bytes in memory.
    """

    __slots__ = ("_data", "_memory", "_name", "size")

    def __init__(self, reader: OpenReader) -> None:
        """Map the file that ``reader`` has open; it may be closed then.

        Raises: CorruptDataError, StorageError.
        """
        self._name = reader.name
        self.size = reader.size
        fd = reader.fileno() if reader.size else None
        self._memory = memoryview(reader.read(0, reader.size)) if fd is None else memoryview(b"")
        try:
            self._data = (
                mmap.mmap(fd, reader.size, access=mmap.ACCESS_READ) if fd is not None else None
            )
        except ValueError:  # mmap checks the size of the open file once more
            raise self._short() from None
        except OSError as error:
            raise from_os_error(error, "map", self._name) from error

    def view(self, begin: int = 0, end: int | None = None) -> memoryview:
        """Return the bytes from ``begin`` to ``end`` without a copy.

        Raises: CorruptDataError when the file was cut.
        """
        if self._data is None:
            return self._memory[begin:end]
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
