"""The bytes of an archive on their way out: collected, hashed, compressed, and written.

They are collected in batches of a few megabytes, each a piece of the tar. The blobs of a batch are
hashed side by side (`blobstore.hashing`), while other threads compress its frames, or write it. So
memory is bounded by a batch, and the bytes do not depend on the number of threads.

A frame begins with every file of the tar, and a larger file has one for every 2 MiB. So each blob
is decompressed without its neighbours, and large ones by several threads; the format allows no
frame of 4 GiB anyway. A frame that compression makes less than 2 % smaller is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from blobstore import hashing
from blobstore.errors import DigestMismatchError
from blobstore.formats.documents import Descriptor
from blobstore.formats.seekable import encode_table, stored_frame
from blobstore.formats.tar import END, in_blocks, member_header
from blobstore.hashing import Bytes
from blobstore.io.ranges import OpenReader
from blobstore.io.workers import results_of

if TYPE_CHECKING:
    from zstandard import ZstdCompressor

FRAME = 2**21
"""Bytes of the tar in a frame, at most."""
LEVEL = 1
"""zstandard's level. Higher ones save less than a tenth of a percent (docs/performance.md)."""

_BATCH = 2**23
_BATCH_OF_FRAMES = 8 * FRAME
"""The same for any number of threads: a batch ends a frame."""
_PROBE = 2**16
_SAVES = 0.98

Parts = Sequence[Bytes]
Write = Callable[[Parts], object]


class _Hashed:
    """A blob that is being collected: its hash, and its bytes in the batch."""

    def __init__(self, descriptor: Descriptor, name: str) -> None:
        self.stream = hashing.stream()
        self.begin = self.end = 0
        self._descriptor = descriptor
        self._name = name
        self._left = descriptor.size

    def check(self) -> None:
        """Count the bytes of this batch as hashed; after the last, compare the digest.

        Raises: DigestMismatchError.
        """
        self._left -= self.end - self.begin
        digest = self._descriptor.digest
        if self._left == 0 and self.stream.digest().hex() != digest.hex:
            message = f"{self._name}: its bytes are not those of {digest}"
            raise DigestMismatchError(message, blob=str(digest), path=self._name)


class TarWriter:
    """Writes a tar, file by file. ``write`` is called with its bytes, by one thread at a time.

    ``compresses``: in frames, with a seek table.
    """

    def __init__(self, write: Write, *, compresses: bool, jobs: int) -> None:
        self._write = write
        self._compresses = compresses
        self._jobs = jobs
        self._batch = memoryview(bytearray(_BATCH_OF_FRAMES if compresses else _BATCH))
        self._filled = 0
        self._begins: list[int] = []
        self._hashed: list[_Hashed] = []
        self._frames: list[tuple[int, int]] = []

    def add_bytes(self, path: str, data: bytes) -> None:
        """Add a file. Raises: as `flush`."""
        self._begin_file(path, len(data))
        self._add(data)
        self._add(bytes(in_blocks(len(data)) - len(data)))

    def add_blob(self, path: str, descriptor: Descriptor, reader: OpenReader) -> None:
        """Add a file with all bytes of a reader, which are checked with those of their batch.

        Raises: as ``reader``, and as `flush`.
        """
        self._begin_file(path, descriptor.size)
        blob = _Hashed(descriptor, reader.name)
        self._hash(blob)
        done = 0
        while done < descriptor.size:
            if self._filled == len(self._batch):
                self.flush()
                self._hash(blob)
            room = self._room(descriptor.size - done)
            reader.readinto(done, room)
            done += len(room)
            self._filled += len(room)
            blob.end = self._filled
        self._add(bytes(in_blocks(descriptor.size) - descriptor.size))

    def _hash(self, blob: _Hashed) -> None:
        blob.begin = blob.end = self._filled
        self._hashed.append(blob)

    def _begin_file(self, path: str, size: int) -> None:
        header = member_header(path, size)
        if len(self._batch) - self._filled < len(header):
            self.flush()
        self._begins.append(self._filled)
        self._add(header)

    def _room(self, wanted: int) -> memoryview:
        """Return the place of the next bytes: the rest of the frame or batch, or ``wanted``."""
        if not self._begins or self._filled - self._begins[-1] == FRAME:
            self._begins.append(self._filled)
        return self._batch[self._filled : self._begins[-1] + FRAME][:wanted]

    def _add(self, data: bytes) -> None:
        while data:
            if self._filled == len(self._batch):
                self.flush()
            room = self._room(len(data))
            room[:] = data[: len(room)]
            self._filled += len(room)
            data = data[len(room) :]

    def flush(self) -> None:
        """Check and write the collected bytes.

        Raises: DigestMismatchError for the first blob with other bytes; as ``write``.
        """
        (self._flush_frames if self._compresses else self._flush_plain)()
        for blob in self._hashed:
            blob.check()
        self._filled = 0
        self._begins, self._hashed = [], []

    def _flush_plain(self) -> None:
        tasks: list[Callable[[], object]] = [
            self._hash_all,
            lambda: self._write([self._batch[: self._filled]]),
        ]
        results_of(tasks, lambda task: task(), self._jobs, name="archive")

    def _flush_frames(self) -> None:
        edges = [*self._begins, self._filled]
        frames = [self._batch[a:b] for a, b in pairwise(edges) if b > a]
        tasks: list[Callable[[], Parts]] = [self._hash_all]
        tasks += [partial(compressed, frame) for frame in frames]
        _, *found = results_of(tasks, lambda task: task(), self._jobs, name="archive")
        for frame, parts in zip(frames, found, strict=True):
            self._frames.append((sum(map(len, parts)), len(frame)))
        self._write([part for parts in found for part in parts])

    def _hash_all(self) -> Parts:
        views = [self._batch[blob.begin : blob.end] for blob in self._hashed]
        hashing.update_all([blob.stream for blob in self._hashed], views)
        return ()

    def finish(self) -> None:
        """Write the end of the tar, and the seek table. Raises: as `flush`."""
        self._begins.append(self._filled)
        self._add(END)
        self.flush()
        if self._compresses:
            self._write([encode_table(self._frames)])


def compressed(data: memoryview) -> Parts:
    """Return the parts of a frame of zstandard with these bytes.

    A sample from the middle tells whether compressing all of it is worth the time.
    """
    import zstandard

    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    middle = (len(data) - _PROBE) // 2
    if middle <= 0 or _saves(data[middle : middle + _PROBE], compressor):
        frame = compressor.compress(data)
        if len(frame) < _SAVES * len(data):
            return [frame]
    return list(stored_frame(data))


def _saves(data: memoryview, compressor: ZstdCompressor) -> bool:
    return len(compressor.compress(data)) < _SAVES * len(data)
