"""Writing a blob to a file of a session, while it is hashed.

`BlobWriter` writes one blob of known size, by any thread at any offset, and gives
its pieces to the hash stage.
Two things keep memory and the page cache small. Bytes that can't be hashed yet wait in the caller's
buffer, which is released when they are hashed. Bytes that come too early for that (the scales of a
tensor whose weight is still being written) are written, and read back when it is their turn. Large
aligned pieces are written with O_DIRECT where the system has it: a model that is twice the memory
would otherwise push everything else out of the page cache, and on a virtual machine filling that
cache costs more than the disk does (docs/performance.md, "Import").
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from blobstore.errors import CorruptDataError
from blobstore.hashing.stage import HashStage, Piece
from blobstore.io.durable import (
    DIRECT_FROM,
    create_file,
    open_direct,
    os_errors,
    sync,
    write_aligned,
    write_all_at,
)
from blobstore.io.ranges import close_quietly
from blobstore.names import Digest
from blobstore.store.local.blobs import FinishedBlob, Stamp

_READ_BACK = 2**19
"""Bytes of a gap that are read back at a time."""


def write_whole(
    folder: Path, digest: Digest, data: memoryview, name: str, *, syncs: bool
) -> FinishedBlob:
    """Write a blob in one piece to ``folder``; return it.

    ``name``: of its file meanwhile, if another file of the digest is there. Raises: StorageError.
    """
    path = f"{os.fspath(folder)}/{digest.file_name}"
    with os_errors("write", path):
        try:
            fd, written = create_file(path), path
        except FileExistsError:  # two tensors of the model are equal
            written = f"{os.fspath(folder)}/{name}"
            fd = create_file(written)
        try:
            write_all_at(fd, 0, data)
            if syncs:
                sync(fd)
            stamp = Stamp.of(os.fstat(fd))
        finally:
            close_quietly(fd)
        if written != path:
            os.rename(written, path)  # noqa: PTH104  # a hundred thousand of them
    return FinishedBlob(digest, len(data), folder, stamp)


class _Memory:
    """Memory for a piece that is read back.

    It is taken from ``spare``, and given back when the piece was hashed. Fresh memory is filled
    with zeros, which takes half as long as to hash it.
    """

    def __init__(self, spare: list[bytearray]) -> None:
        self._spare = spare
        self._data: bytearray | None = None

    def take(self) -> memoryview:
        try:
            self._data = self._spare.pop()
        except IndexError:
            self._data = bytearray(_READ_BACK)
        return memoryview(self._data)

    def give_back(self) -> None:
        data, self._data = self._data, None
        if data is not None:
            self._spare.append(data)


class BlobWriter:
    """Writes and hashes one blob of ``size`` bytes into ``folder``. See `Session.writer`.

    When its last byte is hashed, the blob is durable with ``syncs``, and ``finished`` is called.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        size: int,
        finished: Callable[[FinishedBlob], None],
        stage: HashStage | None = None,
        *,
        syncs: bool = False,
    ) -> None:
        self._folder = folder
        self._path = folder / name
        self._size = size
        self._finished = finished
        self._stage = stage or HashStage()
        self._hashes_itself = stage is None
        self._hash = self._stage.blob(size, self._finish)
        self._syncs = syncs
        self._mutex = threading.Lock()
        self._fd = self._direct = -1

    def put(
        self,
        offset: int,
        data: Any,
        *,
        beside: Sequence[tuple[int, Any]] = (),
        gap: int = 0,
        aligned: bool = False,
        waits: bool = True,
        hashed: Callable[[], None] = lambda: None,
    ) -> None:
        """See `Writer`. Raises: StorageError (no space, I/O); CorruptDataError."""
        view = memoryview(data).cast("B")
        # Bytes that will be read back are best left in the page cache.
        self._write(offset, view, beside, aligned=aligned and waits)
        end = offset + len(view)
        if waits:
            self._hash.add(offset, Piece(len(view), lambda: view, hashed))
        else:
            hashed()
            self._add_read_back(offset, end)
        self._add_read_back(end, end + gap)
        if self._hashes_itself:
            self._stage.work_while(lambda: True)

    def _add_read_back(self, begin: int, end: int) -> None:
        """Let bytes of the file be hashed in their turn."""
        for start in range(begin, end, _READ_BACK):
            length = min(_READ_BACK, end - start)
            memory = _Memory(self._stage.spare)
            read = partial(self._read_back, start, length, memory)
            self._hash.add(start, Piece(length, read, memory.give_back))

    def _open(self) -> None:
        with self._mutex, os_errors("create", self._path):
            if self._fd >= 0:
                return
            is_large = self._size >= DIRECT_FROM
            self._fd = create_file(self._path, self._size if is_large else 0)
            self._direct = open_direct(self._path) if is_large else -1

    def _write(
        self, offset: int, view: memoryview, beside: Sequence[tuple[int, Any]], *, aligned: bool
    ) -> None:
        if self._fd < 0:
            self._open()
        with os_errors("write", self._path):
            write_aligned(self._fd, self._direct if aligned else -1, offset, view, beside)

    def _read_back(self, start: int, length: int, memory: _Memory) -> memoryview:
        data = memory.take()[:length]
        filled = 0
        with os_errors("read back", self._path):
            while filled < length:
                count = os.preadv(self._fd, [data[filled:]], start + filled)
                if not count:
                    end = f"{start + filled:,} of {self._size:,}"
                    raise CorruptDataError(f"{self._path} ends at byte {end}")
                filled += count
        return data

    def _finish(self, raw_digest: bytes) -> None:
        digest = Digest(raw_digest.hex())
        with os_errors("write", self._path):
            if self._syncs:
                sync(self._fd)
            stamp = Stamp.of(os.fstat(self._fd))
            self._path.rename(self._folder / digest.file_name)
        self.close()
        self._finished(FinishedBlob(digest, self._size, self._folder, stamp))

    def check(self) -> None:
        """Raise the error that the blob failed for, perhaps in a thread that hashed it."""
        self._hash.check()

    def release(self) -> None:
        self._hash.abandon()

    def close(self) -> None:
        """Close the file, when no thread writes to it any more; a second call does nothing.

        Errors are ignored: a finished blob is synced by then, or will be by `LocalSession.publish`,
        which reports them.
        """
        self.release()
        open_fds = {self._fd, self._direct} - {-1}
        self._fd = self._direct = -1
        for fd in open_fds:
            close_quietly(fd)
