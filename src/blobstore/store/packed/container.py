"""The index of a packed file as a value, and its bytes. docs/formats.md has the layout.

A file holds one large blob, or many small ones. The stored bytes of all frames come first; the
index follows them, because their lengths are known only when they are coded.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from blobstore.errors import CorruptDataError, LimitExceededError
from blobstore.names import Digest
from blobstore.store.packed.cuts import FRAME

MAGIC = b"BSPACK\x01\n"
END = b"BSPEND\x01\n"
MAX_INDEX = 2**26
"""Bytes of an index: enough for a blob of 1.8 TB, or for 400,000 small blobs."""
MAX_BASES = 2**16 - 1
"""Base blobs of a file."""
TRAILER = struct.Struct("<QQ32s8s")
"""Offset and length of the index, its sha256, and `END`."""

_COUNTS = struct.Struct("<III")
_BLOB = struct.Struct("<32sQI")
_BASE = struct.Struct("<32sQ")
_FRAME = struct.Struct("<IBBHQI4I")
_WIDTHS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a blob: its plain bytes, and its stored ones.

    ``parts``: the stored length of each plane; ``is_coded``: whether zstandard coded it.
    ``checksum``: the CRC-32 of the stored bytes. ``base``: the number of the base blob, None
    without one, and ``base_offset`` where the bytes begin in it.
    """

    nbytes: int
    parts: tuple[int, ...]
    is_coded: tuple[bool, ...]
    checksum: int
    base: int | None = None
    base_offset: int = 0

    @property
    def stored(self) -> int:
        """Stored bytes."""
        return sum(self.parts)


@dataclass(frozen=True, slots=True)
class PackedBlob:
    """A blob of a packed file: its digest, its size, and its frames in order.

    ``offset``: where the stored bytes of its first frame begin in the file.
    """

    digest: Digest
    size: int
    frames: tuple[Frame, ...]
    offset: int

    @property
    def stored(self) -> int:
        """Stored bytes, without the index."""
        return sum(frame.stored for frame in self.frames)


@dataclass(frozen=True)
class PackedIndex:
    """The blobs of a packed file in order, and the base blobs that decoding them needs.

    ``bases``: digest and size of each.
    """

    blobs: tuple[PackedBlob, ...]
    bases: tuple[tuple[Digest, int], ...] = ()

    @cached_property
    def by_digest(self) -> Mapping[str, PackedBlob]:
        """The blobs by the hex digits of their digests."""
        return {blob.digest.hex: blob for blob in self.blobs}


def index_bytes(index: PackedIndex) -> bytes:
    """Return the bytes behind the frames of a file: index and trailer.

    Raises: LimitExceededError over 64 MiB.
    """
    frames = [frame for blob in index.blobs for frame in blob.frames]
    parts = [_COUNTS.pack(len(index.blobs), len(index.bases), len(frames))]
    parts += [
        _BLOB.pack(bytes.fromhex(blob.digest.hex), blob.size, len(blob.frames))
        for blob in index.blobs
    ]
    parts += [_BASE.pack(bytes.fromhex(digest.hex), size) for digest, size in index.bases]
    parts += map(_frame_bytes, frames)
    raw = b"".join(parts)
    if len(raw) > MAX_INDEX:
        message = f"limit exceeded: an index of {len(raw):,} bytes, at most {MAX_INDEX:,}"
        raise LimitExceededError(message)
    offset = len(MAGIC) + sum(frame.stored for frame in frames)
    return raw + TRAILER.pack(offset, len(raw), hashlib.sha256(raw).digest(), END)


def _frame_bytes(frame: Frame) -> bytes:
    lengths = (*frame.parts, 0, 0, 0, 0)[:4]
    coded = sum(is_coded << number for number, is_coded in enumerate(frame.is_coded))
    base = 0 if frame.base is None else frame.base + 1
    offset = frame.base_offset
    return _FRAME.pack(
        frame.nbytes, len(frame.parts), coded, base, offset, frame.checksum, *lengths
    )


def index_place(trailer: bytes, size: int) -> tuple[int, int]:
    """Return offset and length of the index of a file of ``size`` bytes.

    Raises: CorruptDataError if the trailer is not that of a whole packed file.
    """
    offset, length, _, end = TRAILER.unpack(trailer)
    if end != END or length > MAX_INDEX or offset + length + TRAILER.size != size:
        raise _damaged("its end is not that of a packed file")
    return offset, length


def parse_index(raw: bytes, trailer: bytes) -> PackedIndex:
    """Return the index in ``raw``. Raises: CorruptDataError if it is damaged or contradictory."""
    offset, _, sha256, _ = TRAILER.unpack(trailer)
    if hashlib.sha256(raw).digest() != sha256:
        raise _damaged("its index is damaged")
    try:
        index = _parsed(raw)
    except struct.error:
        raise _damaged("its index has the wrong length") from None
    if len(MAGIC) + sum(blob.stored for blob in index.blobs) != offset:
        raise _damaged("its frames do not end where its index begins")
    return index


def _parsed(raw: bytes) -> PackedIndex:
    blobs, bases, frames = _COUNTS.unpack_from(raw)
    first = _COUNTS.size + blobs * _BLOB.size
    frames_at = first + bases * _BASE.size
    if frames_at + frames * _FRAME.size != len(raw):
        raise _damaged("its index has the wrong length")
    heads = list(_BLOB.iter_unpack(raw[_COUNTS.size : first]))
    if sum(count for _, _, count in heads) != frames:
        raise _damaged("its blobs have another number of frames than its index")
    found = (_frame(fields, bases) for fields in _FRAME.iter_unpack(raw[frames_at:]))
    known = tuple(
        (Digest(digest.hex()), size) for digest, size in _BASE.iter_unpack(raw[first:frames_at])
    )
    return PackedIndex(tuple(_blobs(heads, found)), known)


def _blobs(
    heads: Sequence[tuple[bytes, int, int]], frames: Iterator[Frame]
) -> Iterator[PackedBlob]:
    offset = len(MAGIC)
    for digest, size, count in heads:
        blob = PackedBlob(
            Digest(digest.hex()), size, tuple(next(frames) for _ in range(count)), offset
        )
        if sum(frame.nbytes for frame in blob.frames) != size:
            raise _damaged(f"the frames of blob {blob.digest} have another size than the blob")
        offset += blob.stored
        yield blob


def _frame(fields: tuple[int, ...], bases: int) -> Frame:
    """Return a frame. Raises: CorruptDataError for one that can't be decoded."""
    nbytes, width, coded, base, base_offset, checksum, *lengths = fields
    if not 0 < nbytes <= FRAME or width not in _WIDTHS or nbytes % width or base > bases:
        raise _damaged("its index describes an impossible frame")
    parts, plane = tuple(lengths[:width]), nbytes // width
    is_coded = tuple(bool(coded >> number & 1) for number in range(width))
    sizes_fit = all(
        length < plane if has_code else length == plane
        for length, has_code in zip(parts, is_coded, strict=True)
    )
    if not sizes_fit or coded >> width or any(lengths[width:]):
        raise _damaged("its index describes an impossible frame")
    return Frame(nbytes, parts, is_coded, checksum, base - 1 if base else None, base_offset)


def _damaged(what: str) -> CorruptDataError:
    return CorruptDataError(f"packed file is damaged: {what}")
