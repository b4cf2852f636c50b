"""Reading packed files: each blob is a reader of its plain bytes."""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Self

from blobstore.errors import BlobStoreError, CorruptDataError, ShortReadError
from blobstore.io.ranges import FileIdentity, FileReader, OpenReader
from blobstore.names import Digest
from blobstore.store.packed.coders import Decoder
from blobstore.store.packed.container import (
    MAGIC,
    TRAILER,
    Frame,
    PackedBlob,
    PackedIndex,
    index_place,
    parse_index,
)

OpenBase = Callable[[Digest, int], OpenReader]
"""Opens the blob of a digest and size that another was packed against."""


_KEPT = 16
"""Number of indexes in memory: some MB, if all describe thousands of small blobs."""


class IndexCache:
    """The indexes of the files that were opened last: one may describe thousands of small blobs."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._kept: OrderedDict[FileIdentity, PackedIndex] = OrderedDict()

    def index(self, reader: FileReader) -> PackedIndex:
        """Return the index of an open packed file. Raises: CorruptDataError; StorageError."""
        with self._mutex:
            known = self._kept.get(reader.identity)
            if known is None:
                known = self._kept[reader.identity] = index_in(reader)
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            return known


def index_in(reader: FileReader) -> PackedIndex:
    """Return the index of a packed file. Raises: CorruptDataError; StorageError."""
    if reader.size < len(MAGIC) + TRAILER.size or reader.read(0, len(MAGIC)) != MAGIC:
        raise CorruptDataError("packed file is damaged: it does not begin as one")
    trailer = reader.read(reader.size - TRAILER.size, TRAILER.size)
    return parse_index(reader.read(*index_place(trailer, reader.size)), trailer)


class PackedFile:
    """An open packed file, and its index. A context manager.

    Raises: CorruptDataError, with ``path``, if it is damaged; as `FileReader`.
    """

    def __init__(self, path: Path, open_base: OpenBase, indexes: IndexCache | None = None) -> None:
        self.path = path
        self.open_base = open_base
        self._reader = FileReader(path, follow=False)
        try:
            self.index = (indexes or IndexCache()).index(self._reader)
        except BlobStoreError as error:
            self._reader.close()
            raise error.at(str(path), path=str(path)) from error

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._reader.size

    def reader(self, blob: PackedBlob) -> PackedReader:
        """Return a reader of a blob's plain bytes, which ends with the file."""
        return PackedReader(self, blob)

    def read_stored(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with stored bytes. Raises: as `FileReader`."""
        self._reader.readinto(offset, buffer)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PackedReader(OpenReader):
    """The plain bytes of one blob of a packed file, for one thread.

    A frame is checked against its checksum and decoded when a byte of it is read, and kept until
    another is. ``closes``: close the file with the reader. Raises: CorruptDataError, with ``blob``
    and ``path``, for a damaged frame; as the base's reader.
    """

    identity = None

    def __init__(self, file: PackedFile, blob: PackedBlob, *, closes: bool = False) -> None:
        self.name = f"{file.path} (blob {blob.digest})"
        self.size = blob.size
        self._file = file
        self._blob = blob
        self._closes = closes
        self._decoder = Decoder()
        self._bases: dict[Digest, OpenReader] = {}
        self._frame = memoryview(b"")
        self._number = 0
        self._begin = 0
        self._offset = blob.offset

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset``."""
        data = bytearray(length)
        self.readinto(offset, memoryview(data))
        return bytes(data)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``."""
        if offset + len(buffer) > self.size:
            message = f"{self.name} has {self.size:,} bytes, not {offset + len(buffer):,}"
            raise ShortReadError(message, blob=str(self._blob.digest), path=str(self._file.path))
        while buffer:
            self._seek(offset)
            piece = self._frame[offset - self._begin :][: len(buffer)]
            buffer[: len(piece)] = piece
            buffer, offset = buffer[len(piece) :], offset + len(piece)

    def _seek(self, offset: int) -> None:
        """Make the frame with the byte at ``offset`` the decoded one."""
        if offset < self._begin:
            self._number, self._begin, self._offset = 0, 0, self._blob.offset
            self._frame = memoryview(b"")
        frames = self._blob.frames
        moved = not self._frame
        while offset >= self._begin + frames[self._number].nbytes:
            self._begin += frames[self._number].nbytes
            self._offset += frames[self._number].stored
            self._number += 1
            moved = True
        if moved:
            self._frame = memoryview(b"")  # the next read must not find it if decoding fails
            self._frame = self._decoded(frames[self._number])

    def _decoded(self, frame: Frame) -> memoryview:
        stored = memoryview(bytearray(frame.stored))
        try:
            self._file.read_stored(self._offset, stored)
            if zlib.crc32(stored) != frame.checksum:
                raise CorruptDataError(f"the bytes at {self._offset:,} do not match their checksum")
            out = memoryview(bytearray(frame.nbytes))
            self._decoder.decode(_parts(stored, frame), frame.is_coded, out, self._base(frame))
        except BlobStoreError as error:
            place = {"blob": str(self._blob.digest), "path": str(self._file.path)}
            raise error.at(f"packed {self.name} is damaged", **place) from error
        return out

    def _base(self, frame: Frame) -> memoryview | None:
        """Return the bytes of the base blob that a frame needs, or None."""
        if frame.base is None:
            return None
        digest, size = self._file.index.bases[frame.base]
        if digest not in self._bases:
            self._bases[digest] = self._file.open_base(digest, size)
        return memoryview(self._bases[digest].read(frame.base_offset, frame.nbytes))

    def close(self) -> None:
        """Close it, and its base blobs."""
        for reader in self._bases.values():
            reader.close()
        self._bases.clear()
        if self._closes:
            self._file.close()


def _parts(stored: memoryview, frame: Frame) -> tuple[memoryview, ...]:
    parts, begin = [], 0
    for length in frame.parts:
        parts.append(stored[begin : begin + length])
        begin += length
    return tuple(parts)
