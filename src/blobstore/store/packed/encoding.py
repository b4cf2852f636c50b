"""Writing a packed file, and reading it back once to check it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blobstore.errors import DigestMismatchError
from blobstore.formats.documents import Descriptor
from blobstore.io.durable import create_file, os_errors, sync, write_all_at
from blobstore.io.ranges import OpenReader, close_quietly
from blobstore.io.workers import Progress, silent
from blobstore.names import Digest
from blobstore.store.packed.coders import Coded, Encoder
from blobstore.store.packed.container import (
    MAGIC,
    MAX_BASES,
    Frame,
    PackedBlob,
    PackedIndex,
    index_bytes,
)
from blobstore.store.packed.cuts import FRAME, Cut, frames_of
from blobstore.store.packed.decoding import OpenBase, PackedFile

Open = Callable[[Descriptor], OpenReader]
CutBlob = Callable[[Descriptor, OpenReader], Sequence[Cut]]


@dataclass(slots=True)
class _PackedWriter:
    """Writes the frames of one file, in order, by one thread."""

    fd: int
    path: Path
    open_base: OpenBase
    progress: Progress
    offset: int = 0
    bases: dict[Digest, tuple[int, int]] = field(default_factory=dict)
    """Number and size of each base blob."""
    _encoder: Encoder = field(default_factory=Encoder)
    _buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(FRAME)))
    _base: memoryview = field(default_factory=lambda: memoryview(bytearray(FRAME)))
    _opened: dict[Digest, OpenReader] = field(default_factory=dict)

    def add(self, descriptor: Descriptor, reader: OpenReader, cuts: Sequence[Cut]) -> PackedBlob:
        """Write the frames of a blob. Raises: as ``reader``; StorageError."""
        begin = self.offset
        frames = tuple(self._frame(frame, reader) for cut in cuts for frame in frames_of(cut))
        self.progress(descriptor.size, descriptor.name or str(descriptor.digest))
        return PackedBlob(descriptor.digest, descriptor.size, frames, begin)

    def _frame(self, cut: Cut, reader: OpenReader) -> Frame:
        data = self._buffer[: cut.end - cut.begin]
        reader.readinto(cut.begin, data)
        coded = self._encoder.encode(data, cut.coding, cut.width, self._base_of(cut))
        checksum = 0
        for part in coded.parts:
            self.write(part)
            checksum = zlib.crc32(part, checksum)
        return self._described(cut, coded, checksum)

    def _described(self, cut: Cut, coded: Coded, checksum: int) -> Frame:
        lengths = tuple(map(len, coded.parts))
        if cut.base is None or not coded.has_base:
            return Frame(cut.end - cut.begin, lengths, coded.is_coded, checksum)
        number, _ = self.bases.setdefault(cut.base.digest, (len(self.bases), cut.base.size))
        place = cut.base.offset
        return Frame(cut.end - cut.begin, lengths, coded.is_coded, checksum, number, place)

    def _base_of(self, cut: Cut) -> memoryview | None:
        if cut.base is None or len(self.bases) >= MAX_BASES:
            return None
        if cut.base.digest not in self._opened:
            self.close()  # the tensors of a blob are often those of one base blob
            self._opened[cut.base.digest] = self.open_base(cut.base.digest, cut.base.size)
        data = self._base[: cut.end - cut.begin]
        self._opened[cut.base.digest].readinto(cut.base.offset, data)
        return data

    def write(self, data: memoryview | bytes) -> None:
        """Append to the file. Raises: StorageError."""
        with os_errors("write", self.path):
            write_all_at(self.fd, self.offset, memoryview(data))
        self.offset += len(data)

    def close(self) -> None:
        """Close the base blobs."""
        for reader in self._opened.values():
            reader.close()
        self._opened.clear()


def write_packed(
    path: Path,
    blobs: Sequence[Descriptor],
    open_blob: Open,
    cut_blob: CutBlob,
    open_base: OpenBase,
    progress: Progress = silent,
) -> PackedIndex:
    """Write a packed file of ``blobs``, check and sync it; return its index.

    It is read back and decoded once: the bytes of every blob must match its digest. Memory: one
    frame, and the index. Raises: as ``open_blob``; DigestMismatchError for a blob that is damaged;
    LimitExceededError for an index over 64 MiB; StorageError.
    """
    with os_errors("create", path):
        fd = create_file(path)
    try:
        writer = _PackedWriter(fd, path, open_base, progress)
        try:
            writer.write(MAGIC)
            found = []
            for blob in blobs:
                with open_blob(blob) as reader:
                    found.append(writer.add(blob, reader, cut_blob(blob, reader)))
            index = PackedIndex(
                tuple(found), tuple((digest, size) for digest, (_, size) in writer.bases.items())
            )
            writer.write(index_bytes(index))
        finally:
            writer.close()
        _check(path, open_base)
        with os_errors("write", path):
            sync(fd)
    finally:
        close_quietly(fd)
    return index


def _check(path: Path, open_base: OpenBase) -> None:
    """Raise unless every blob of a packed file decodes to the bytes of its digest."""
    with PackedFile(path, open_base) as packed:
        for blob in packed.index.blobs:
            if packed.reader(blob).digest() != blob.digest:
                message = f"blob {blob.digest} is damaged: its bytes do not match its digest"
                raise DigestMismatchError(message, blob=str(blob.digest))
