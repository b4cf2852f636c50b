"""BlobWriter: one blob of a size known beforehand, written at any offsets by any thread, hashed in order as it comes.

Two things keep memory and the page cache small. What can't be hashed yet waits in the caller's
buffer, which is given back when it is hashed; and bytes that come too early for that (the scales of
a tensor whose weight is still being written) are written, and read back when their turn comes.
Large aligned pieces are written with O_DIRECT where there is such a thing: a model that is twice
the memory would otherwise push everything else out of the page cache, and on a virtual machine
filling that cache costs more than the disk does (docs/performance.md, "Import").
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.errors import CorruptDataError
from blobstore.io.durable import (
    DIRECT_FROM,
    create_file,
    open_direct,
    os_errors,
    sync,
    write_aligned,
    write_all_at,
)
from blobstore.io.ranges import close_quietly, is_coarse
from blobstore.names import Digest

_READ_BACK = 2**18


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells whether a file was written to since: its inode and the time of the last write, in nanoseconds.

    ``is_sure``: a later write would show. With a coarse clock it would not, for as long as the tick
    lasts.
    """

    inode: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Return the stamp of a file's status."""
        return cls(status.st_ino, status.st_mtime_ns)

    @property
    def is_sure(self) -> bool:
        """True with a clock that ticks at every write."""
        return not is_coarse(self.mtime_ns)


@dataclass(frozen=True, slots=True)
class FinishedBlob:
    """A blob that is complete: its digest, its size in bytes, the folder of its file, the file's stamp."""

    digest: Digest
    size: int
    folder: Path
    stamp: Stamp

    @property
    def path(self) -> Path:
        """Its file, which waits in a session's folder or lies in the store's already."""
        return self.folder / self.digest.file_name


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes that wait to be hashed, how many to read back behind them, and whom to tell."""

    data: memoryview
    gap: int
    hashed: Callable[[], None]


class BlobWriter:
    """Writes and hashes one blob of ``size`` bytes into ``folder``.

    The last byte finishes it, with ``syncs`` durably.

    ``finished`` is given the blob then.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        size: int,
        finished: Callable[[FinishedBlob], None] = lambda _blob: None,
        *,
        syncs: bool = False,
    ) -> None:
        self._finished = finished
        self._syncs = syncs
        self._folder = folder
        self._path = folder / name
        self._size = size
        self._hash = hashlib.sha256()
        self._hashed = 0
        self._waiting: dict[int, _Piece] = {}
        self._is_hashing = False
        self._mutex = threading.Lock()
        self._fd = self._direct = -1

    def put(
        self,
        offset: int,
        data: Any,
        *,
        gap: int = 0,
        aligned: bool = False,
        hashed: Callable[[], None] = lambda: None,
    ) -> FinishedBlob | None:
        """Write the bytes of a contiguous buffer at ``offset``.

        Return the blob when it is now complete, else None.

        ``gap``: so many bytes behind them come by `put_aside`, all of them before the last piece
        before the gap. ``aligned``: the buffer's address has the same remainder by the page size as
        ``offset``. ``hashed`` is called, from any thread, when the buffer is not needed any more.
        Raises: StorageError (no space, I/O); CorruptDataError.
        """
        view = memoryview(data).cast("B")
        if len(view) == self._size and self._size < DIRECT_FROM:
            blob = self._put_whole(view)
            hashed()
            return blob
        self._write(offset, view, aligned=aligned)
        with self._mutex:
            self._waiting[offset] = _Piece(view, gap, hashed)
            if self._is_hashing:
                return None
            self._is_hashing = True
        return self._hash_waiting()

    def _put_whole(self, view: memoryview) -> FinishedBlob:
        """Write a small blob of one piece.

        Models of very many small tensors take half the time if this is short.
        """
        digest = Digest.of(view)
        named = self._folder / digest.file_name
        with os_errors("write", named):
            try:
                self._fd = create_file(named)
                self._path = named
            except FileExistsError:  # two tensors of the model are equal
                self._fd = create_file(self._path)
            write_all_at(self._fd, 0, view)
        return self._finish(digest)

    def put_aside(self, offset: int, data: Any) -> None:
        """Write bytes that lie in a gap. Raises: StorageError."""
        self._write(offset, memoryview(data).cast("B"), aligned=False)

    def _open(self) -> None:
        with self._mutex, os_errors("create", self._path):
            if self._fd < 0:
                self._fd = create_file(self._path, self._size if self._size >= DIRECT_FROM else 0)
                self._direct = open_direct(self._path) if self._size >= DIRECT_FROM else -1

    def _write(self, offset: int, view: memoryview, *, aligned: bool) -> None:
        if self._fd < 0:
            self._open()
        with os_errors("write", self._path):
            if aligned:
                write_aligned(self._fd, self._direct, offset, view)
            else:
                write_all_at(self._fd, offset, view)

    def _hash_waiting(self) -> FinishedBlob | None:
        while True:
            with self._mutex:
                piece = self._waiting.pop(self._hashed, None)
                if piece is None:
                    self._is_hashing = False
                    is_complete = self._hashed == self._size
                    break
            self._hash.update(piece.data)
            start = self._hashed + len(piece.data)
            piece.hashed()
            self._hash_gap(start, piece.gap)
            self._hashed = start + piece.gap
        return self._finish(Digest(self._hash.hexdigest())) if is_complete else None

    def _hash_gap(self, start: int, length: int) -> None:
        buffer = memoryview(bytearray(min(_READ_BACK, length)))
        done = 0
        with os_errors("read back", self._path):
            while done < length:
                count = os.preadv(self._fd, [buffer[: length - done]], start + done)
                if count == 0:
                    raise CorruptDataError(
                        f"{self._path} ends at byte {start + done:,} of {self._size:,}"
                    )
                self._hash.update(buffer[:count])
                done += count

    def _finish(self, digest: Digest) -> FinishedBlob:
        with os_errors("write", self._path):
            if self._syncs:
                sync(self._fd)
            stamp = Stamp.of(os.fstat(self._fd))
            if self._path.name != digest.file_name:
                self._path.rename(self._folder / digest.file_name)
        self.close()
        blob = FinishedBlob(digest, self._size, self._folder, stamp)
        self._finished(blob)
        return blob

    def release(self) -> None:
        """Give back the buffers that wait, when the blob will not be finished."""
        with self._mutex:
            waiting, self._waiting = self._waiting, {}
        for piece in waiting.values():
            piece.hashed()

    def close(self) -> None:
        """Close the file, when no thread writes to it any more; a second call does nothing.

        Errors are ignored: a finished blob is synced by then, or will be by `LocalSession.publish`,
        which reports them.
        """
        self.release()
        fds, self._fd, self._direct = (self._fd, self._direct), -1, -1
        for fd in fds:
            if fd >= 0:
                close_quietly(fd)
