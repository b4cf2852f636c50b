"""Packed files of earlier versions, read only: an own container of frames (docs/formats.md).

One holds a large blob or many small ones. The index is behind the stored bytes of all frames.
A frame has planes of rotated bytes, each coded by zstandard or stored, and may be the difference to
bytes of a base blob.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice
from typing import Any

from blobstore.errors import CorruptDataError
from blobstore.io.ranges import FileReader, OpenReader
from blobstore.names import Digest
from blobstore.store.packed.files import Frames

_MAGIC = b"BSPACK\x01\n"

_END = b"BSPEND\x01\n"
_MAX_INDEX = 2**26
_MAX_FRAME = 2**20
_TRAILER = struct.Struct("<QQ32s8s")
"""Offset and length of the index, its sha256, and `_END`."""
_COUNTS = struct.Struct("<III")
_TABLES = (struct.Struct("<32sQI"), struct.Struct("<32sQ"), struct.Struct("<IBBHQI4I"))
"""A blob: its digest, size and number of frames. A base: its digest and size. A frame."""
_WIDTHS = (1, 2, 4)

OpenBase = Callable[[Digest, int], OpenReader]
"""Opens the blob of a digest and size that another was packed against."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame: its plain bytes, its place in the file, and the stored length of each plane.

    ``coded``: bit k is set if zstandard coded plane k. ``checksum``: the CRC-32 of the stored
    bytes. ``base``: the number of the base blob, from 1, or 0; ``base_offset`` of the bytes in it.
    """

    nbytes: int
    place: int
    lengths: Sequence[int]
    coded: int
    checksum: int
    base: int
    base_offset: int


@dataclass(frozen=True)
class PackedIndex:
    """The frames of each blob of a packed file, by the hex digits of the blob's digest.

    ``bases``: digest and size of the base blobs that they need.
    """

    frames: Mapping[str, Sequence[Frame]]
    bases: Sequence[tuple[Digest, int]]

    def stored(self, digest: str) -> int:
        return sum(sum(frame.lengths) for frame in self.frames[digest])


def read_index(file: OpenReader) -> PackedIndex | None:
    """Return the index of a packed file of earlier versions, None for one of today's.

    Raises: CorruptDataError if it is damaged or contradictory; StorageError.
    """
    if file.read(0, min(file.size, len(_MAGIC))) != _MAGIC:
        return None
    if file.size < len(_MAGIC) + _TRAILER.size:
        raise _damaged("its end is not that of a packed file")
    trailer = file.read(file.size - _TRAILER.size, _TRAILER.size)
    offset, length, sha256, end = _TRAILER.unpack(trailer)
    if end != _END or length > _MAX_INDEX or offset + length + _TRAILER.size != file.size:
        raise _damaged("its end is not that of a packed file")
    raw = file.read(offset, length)
    if hashlib.sha256(raw).digest() != sha256:
        raise _damaged("its index is damaged")
    try:
        blobs, bases, fields = _tables(raw)
    except struct.error:
        raise _damaged("its index has the wrong length") from None
    frames = list(_frames(fields, len(bases)))
    if len(_MAGIC) + sum(sum(frame.lengths) for frame in frames) != offset:
        raise _damaged("its frames do not end where its index begins")
    rest = iter(frames)
    return PackedIndex(
        {digest.hex(): list(islice(rest, count)) for digest, _, count in blobs},
        [(Digest(digest.hex()), size) for digest, size in bases],
    )


def _tables(raw: bytes) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the blobs, the bases and the frames of an index. Raises: struct.error."""
    at = _COUNTS.size
    for table, count in zip(_TABLES, _COUNTS.unpack_from(raw), strict=True):
        end = at + count * table.size
        if end > len(raw):
            raise struct.error
        yield list(table.iter_unpack(raw[at:end]))
        at = end


def _frames(rows: Sequence[tuple[int, ...]], bases: int) -> Iterator[Frame]:
    place = len(_MAGIC)
    for nbytes, width, coded, base, base_offset, checksum, *lengths in rows:
        if not 0 < nbytes <= _MAX_FRAME or width not in _WIDTHS or nbytes % width or base > bases:
            raise _damaged("its index describes an impossible frame")
        yield Frame(nbytes, place, lengths[:width], coded, checksum, base, base_offset)
        place += sum(lengths[:width])


def blob_frames(file: FileReader, index: PackedIndex, digest: str, open_base: OpenBase) -> Frames:
    """Return the frames of one blob of a packed file; closing them closes the file, too."""
    frames = index.frames[digest]
    opened = ExitStack()
    opened.callback(file.close)
    base_of = cache(lambda number: opened.enter_context(open_base(*index.bases[number - 1])))

    def decoded(number: int) -> bytes:
        frame = frames[number]
        base = None
        if frame.base:
            base = base_of(frame.base).read(frame.base_offset, frame.nbytes)
        return _join_rotated(_planes(file, frame), len(frame.lengths), base)

    starts = list(accumulate((frame.nbytes for frame in frames), initial=0))
    return Frames(starts, decoded, opened.close)


def _planes(file: FileReader, frame: Frame) -> bytes:
    import zstandard

    stored = file.read(frame.place, sum(frame.lengths))
    if zlib.crc32(stored) != frame.checksum:
        raise CorruptDataError(f"the bytes at {frame.place:,} do not match their checksum")
    planes = []
    for number, length in enumerate(frame.lengths):
        plane, stored = stored[:length], stored[length:]
        if frame.coded >> number & 1:
            try:
                # Before anything is allocated for it.
                if zstandard.frame_content_size(plane) == frame.nbytes // len(frame.lengths):
                    plane = zstandard.ZstdDecompressor().decompress(plane)
            except zstandard.ZstdError as error:
                raise CorruptDataError(f"a zstandard frame is damaged: {error}") from None
        planes.append(plane)
    if len(joined := b"".join(planes)) != frame.nbytes:
        raise CorruptDataError("a plane has another size than its frame says")
    return joined


def _join_rotated(planes: bytes, width: int, base: bytes | None) -> bytes:
    """Return the items of rotated planes, combined by XOR with as many bytes of ``base``.

    Each little-endian item was rotated left by one bit; plane 0 has the most significant bytes.
    """
    import numpy as np

    rows = np.frombuffer(planes, np.uint8).reshape(width, -1)
    items = rows.T.reshape(-1).view(f">u{width}").astype(f"<u{width}")
    if width > 1:
        items = (items >> 1) | (items << (8 * width - 1))
    if base is not None:
        items = items ^ np.frombuffer(base, items.dtype)
    return items.tobytes()


def _damaged(what: str) -> CorruptDataError:
    return CorruptDataError(f"packed file is damaged: {what}")
