"""Blobs in a folder: files named for the sha256 of their bytes, and the writer of one.

A blob is visible only when it is complete and durable (see session.py).

`BlobWriter` writes one blob of known size, by any thread at any offset, and hashes it in order.
Two things keep memory and the page cache small. Bytes that can't be hashed yet wait in the caller's
buffer, which is released when they are hashed. Bytes that come too early for that (the scales of a
tensor whose weight is still being written) are written, and read back when it is their turn. Large
aligned pieces are written with O_DIRECT where the system has it: a model that is twice the memory
would otherwise push everything else out of the page cache, and on a virtual machine filling that
cache costs more than the disk does (docs/performance.md, "Import").
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.errors import BlobStoreError, CorruptDataError, NotFoundError
from blobstore.formats.documents import MAX_DOCUMENT, Descriptor
from blobstore.io.durable import (
    DIRECT_FROM,
    create_file,
    open_direct,
    os_errors,
    remove_if_there,
    sync,
    write_aligned,
    write_all_at,
)
from blobstore.io.ranges import FileReader, close_quietly, is_coarse
from blobstore.names import Digest
from blobstore.store.ports import (
    blob_not_found,
    check_blob_size,
    check_document_size,
    checked_bytes,
    unique,
)

_READ_BACK = 2**18
_START = "sha256-"
_PREFIX = len(_START)
_is_hex = re.compile(r"[0-9a-f]{64}", re.ASCII).fullmatch
# The first Ollamas wrote "sha256:…"; later ones rename such files when they start (`fixBlobs`).
_OLD_START = "sha256:"
_OLD_NAME = re.compile(rf"{_OLD_START}[0-9a-f]{{64}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class BlobListing:
    """The entries of ``blobs/``: those named for a digest, by its hex digits, and all others.

    An entry may be of any kind, also a link or a folder.
    """

    named: Mapping[str, os.DirEntry[str]]
    others: tuple[os.DirEntry[str], ...]


class BlobFolder:
    """The ``blobs/`` folder of a store: no link is followed, only regular files are opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def listing(self) -> BlobListing:
        """Return what is in the folder.

        If one digest has two names, the older form is among the others. Raises: StorageError.
        """
        named: dict[str, os.DirEntry[str]] = {}
        others: list[os.DirEntry[str]] = []
        for entry in self._entries():
            name = entry.name
            if name.startswith(_START) and _is_hex(name, _PREFIX):
                named[name[_PREFIX:]] = entry
            else:
                others.append(entry)
        for entry in [entry for entry in others if _OLD_NAME.fullmatch(entry.name)]:
            if named.setdefault(entry.name[_PREFIX:], entry) is entry:
                others.remove(entry)
        return BlobListing(named, tuple(sorted(others, key=lambda entry: entry.name)))

    def digests(self) -> set[str]:
        """Return the digests, in hex digits, that regular files in the folder are named for.

        A name that only begins like a blob's is among them, because checking every name takes long;
        `sizes` ignores it. Raises: StorageError.
        """
        with os_errors("list", self.path):
            entries = self._entries()
            names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        return {name[_PREFIX:] for name in names if name.startswith((_START, _OLD_START))}

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Yield the entries of the folder, none if it does not exist. Raises: StorageError."""
        with os_errors("list", self.path):
            if self.path.exists():
                with os.scandir(self.path) as entries:
                    yield from entries

    def sizes(self, digests: Iterable[str]) -> dict[str, int]:
        """Return the sizes in bytes of those of ``digests`` whose blobs are regular files.

        Digests are given and returned in hex digits. Raises: StorageError.
        """
        sizes = {}
        for digest in filter(_is_hex, digests):
            for name in (f"{_START}{digest}", f"{_OLD_START}{digest}"):
                path = f"{self.path}/{name}"
                with suppress(NotFoundError), os_errors("access", path):
                    status = os.lstat(path)
                    if stat.S_ISREG(status.st_mode):
                        sizes[digest] = status.st_size
                        break
        return sizes

    def is_missing(self, digest: str) -> bool:
        """Return True if no file has a blob's name, given in hex digits: faster than `reader`."""
        for start in (_START, _OLD_START):
            try:
                os.lstat(f"{self.path}/{start}{digest}")
            except FileNotFoundError:
                continue
            except OSError:  # opening it raises the error that says why
                pass
            return False
        return True

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """See `Blobs`."""
        return [blob for blob in unique(descriptors) if not self.has(blob.digest, blob.size)]

    def open(self, descriptor: Descriptor) -> FileReader:
        """Return a reader over a blob that has the descriptor's size; its bytes are not checked.

        Raises: as `reader`; CorruptDataError if its size differs, with ``blob``.
        """
        reader = self.reader(descriptor.digest)
        try:
            check_blob_size(descriptor, reader.size, reader.name)
        except BlobStoreError:
            reader.close()
            raise
        return reader

    def reader(self, digest: Digest) -> FileReader:
        """Return a reader over the file that is named for the digest, of whatever size.

        Raises: NotFoundError if it is missing, StorageError unless it is a regular file that can be
        opened; with ``blob``.
        """
        # The second name is an old Ollama's. The first is tried again: FUSE looks a name up and
        # then opens the file that it found. If another import replaces that file in between, it is
        # missing, though its name never is (bindfs).
        for name in (digest.file_name, str(digest), digest.file_name):
            try:
                return FileReader(self.path / name, follow=False)
            except NotFoundError:
                continue
            except BlobStoreError as error:
                raise error.about(blob=str(digest)) from error
        raise blob_not_found(digest, str(self.path))

    def read(self, descriptor: Descriptor, limit: int = MAX_DOCUMENT) -> bytes:
        """Return the bytes of a small blob (a config, a JSON document), checked against its digest.

        Raises: as `open`; LimitExceededError over ``limit`` bytes; DigestMismatchError.
        """
        check_document_size(descriptor, limit)
        with self.open(descriptor) as reader:
            return checked_bytes(reader.read(0, reader.size), descriptor)

    def check(self, descriptor: Descriptor) -> None:
        """Raise, as `open`, unless the blob is a regular file of the descriptor's size."""
        self.open(descriptor).close()

    def has(self, digest: Digest, size: int) -> bool:
        """Return True if the blob is a regular file of that size; it is not read."""
        try:
            self.check(Descriptor(media_type="", digest=digest, size=size))
        except BlobStoreError:
            return False
        return True

    def remove(self, digest: Digest) -> bool:
        """Remove a blob; return False if it did not exist.

        Only for a holder of the store's exclusive lock. Raises: StorageError.
        """
        was_there = False
        for name in (digest.file_name, str(digest)):
            with os_errors("remove", self.path / name):
                was_there = remove_if_there(self.path / name) or was_there
        return was_there


@dataclass(frozen=True, slots=True)
class Stamp:
    """Tells whether a file was written to since: its inode and the time of its last write.

    The part of a `FileIdentity` that a journal can keep: the number of a device may change when the
    machine restarts, and the time of the last change of any kind does with every link.
    """

    inode: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Return the stamp of a file's status."""
        return cls(status.st_ino, status.st_mtime_ns)

    @property
    def is_sure(self) -> bool:
        """True if a later write would change it: the file system's clock is fine enough."""
        return not is_coarse(self.mtime_ns)


@dataclass(frozen=True, slots=True)
class FinishedBlob:
    """A complete blob: its digest, its size in bytes, the folder of its file, the file's stamp."""

    digest: Digest
    size: int
    folder: Path
    stamp: Stamp

    @property
    def path(self) -> Path:
        """Its file, in a session's folder or in the store's."""
        return self.folder / self.digest.file_name


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes that wait to be hashed, the bytes to read back behind them, and the callback."""

    data: memoryview
    gap: int
    hashed: Callable[[], None]


class BlobWriter:
    """Writes and hashes one blob of ``size`` bytes into ``folder``. See `Writer`.

    The last byte finishes it, durably with ``syncs``; then ``finished`` is called with the blob.
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
        """See `Writer`. Raises: StorageError (no space, I/O); CorruptDataError."""
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
        """Write a small blob of one piece: models of many small tensors take half the time."""
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
        """See `Writer`."""
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
        end = start + length
        with os_errors("read back", self._path):
            while start < end:
                data = os.pread(self._fd, min(_READ_BACK, end - start), start)
                if not data:
                    raise CorruptDataError(f"{self._path} ends at byte {start:,} of {self._size:,}")
                self._hash.update(data)
                start += len(data)

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
        """See `Writer`."""
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
        open_fds = {self._fd, self._direct} - {-1}
        self._fd = self._direct = -1
        for fd in open_fds:
            close_quietly(fd)
