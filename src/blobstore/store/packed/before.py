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
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from blobstore.errors import CorruptDataError
from blobstore.io.ranges import FileReader, OpenReader
from blobstore.names import Digest

MAGIC = b"BSPACK\x01\n"

_END = b"BSPEND\x01\n"
_MAX_INDEX = 2**26
_MAX_FRAME = 2**20
_TRAILER = struct.Struct("<QQ32s8s")
"""Offset and length of the index, its sha256, and `_END`."""
_COUNTS = struct.Struct("<III")
_BLOB = struct.Struct("<32sQI")
_BASE = struct.Struct("<32sQ")
_FRAME = struct.Struct("<IBBHQI4I")
_WIDTHS = (1, 2, 4)

OpenBase = Callable[[Digest, int], OpenReader]
"""Opens the blob of a digest and size that another was packed against."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame: its plain bytes, and the stored length of each plane.

    ``is_coded``: whether zstandard coded the plane. ``checksum``: the CRC-32 of the stored bytes.
    ``base``: the number of the base blob, if any, and ``base_offset`` of the bytes in it.
    """

    nbytes: int
    parts: tuple[int, ...]
    is_coded: tuple[bool, ...]
    checksum: int
    base: int | None
    base_offset: int


@dataclass(frozen=True, slots=True)
class PackedBlob:
    """A blob of a packed file; ``offset`` of its first stored byte counts from the file's."""

    digest: Digest
    size: int
    frames: tuple[Frame, ...]
    offset: int

    @property
    def stored(self) -> int:
        """Stored bytes, without the index."""
        return sum(sum(frame.parts) for frame in self.frames)


@dataclass(frozen=True)
class PackedIndex:
    """The blobs of a packed file in order; digest and size of the base blobs they need."""

    blobs: tuple[PackedBlob, ...]
    bases: tuple[tuple[Digest, int], ...]

    @cached_property
    def by_digest(self) -> Mapping[str, PackedBlob]:
        """The blobs by the hex digits of their digests."""
        return {blob.digest.hex: blob for blob in self.blobs}


def read_index(file: OpenReader) -> PackedIndex:
    """Return the index of a file that begins with `MAGIC`.

    Raises: CorruptDataError if it is damaged or contradictory; StorageError.
    """
    if file.size < len(MAGIC) + _TRAILER.size:
        raise _damaged("its end is not that of a packed file")
    trailer = file.read(file.size - _TRAILER.size, _TRAILER.size)
    offset, length, sha256, end = _TRAILER.unpack(trailer)
    if end != _END or length > _MAX_INDEX or offset + length + _TRAILER.size != file.size:
        raise _damaged("its end is not that of a packed file")
    raw = file.read(offset, length)
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
    parsed = (_frame(fields, bases) for fields in _FRAME.iter_unpack(raw[frames_at:]))
    known = _BASE.iter_unpack(raw[first:frames_at])
    return PackedIndex(
        tuple(_blobs(heads, parsed)),
        tuple((Digest(digest.hex()), size) for digest, size in known),
    )


def _blobs(
    heads: Sequence[tuple[bytes, int, int]], frames: Iterator[Frame]
) -> Iterator[PackedBlob]:
    offset = len(MAGIC)
    for digest, size, count in heads:
        own = tuple(next(frames) for _ in range(count))
        blob = PackedBlob(Digest(digest.hex()), size, own, offset)
        if sum(frame.nbytes for frame in own) != size:
            raise _damaged(f"the frames of blob {blob.digest} have another size than the blob")
        offset += blob.stored
        yield blob


def _frame(fields: tuple[int, ...], bases: int) -> Frame:
    """Return a frame. Raises: CorruptDataError for one that can't be decoded."""
    nbytes, width, coded, base, base_offset, checksum, *lengths = fields
    if not 0 < nbytes <= _MAX_FRAME or width not in _WIDTHS or nbytes % width or base > bases:
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


class BlobFrames:
    """The frames of one blob of a packed file. See `Frames`."""

    def __init__(
        self, file: FileReader, index: PackedIndex, blob: PackedBlob, open_base: OpenBase
    ) -> None:
        self.starts = list(accumulate((frame.nbytes for frame in blob.frames), initial=0))
        self._places = list(
            accumulate((sum(frame.parts) for frame in blob.frames), initial=blob.offset)
        )
        self._file = file
        self._index = index
        self._frames = blob.frames
        self._open_base = open_base
        self._bases: dict[Digest, OpenReader] = {}

    def decoded(self, number: int) -> bytes:
        """See `Frames`. Raises: CorruptDataError; as the base's reader."""
        from blobstore.kernels.planes import join_rotated_planes

        frame = self._frames[number]
        stored = self._file.read(self._places[number], sum(frame.parts))
        if zlib.crc32(stored) != frame.checksum:
            place = self._places[number]
            raise CorruptDataError(f"the bytes at {place:,} do not match their checksum")
        planes = b"".join(_planes(stored, frame))
        return join_rotated_planes(planes, len(frame.parts), self._base(frame))

    def _base(self, frame: Frame) -> bytes | None:
        if frame.base is None:
            return None
        digest, size = self._index.bases[frame.base]
        if digest not in self._bases:
            self._bases[digest] = self._open_base(digest, size)
        return self._bases[digest].read(frame.base_offset, frame.nbytes)

    def close(self) -> None:
        """See `Frames`."""
        for reader in self._bases.values():
            reader.close()
        self._file.close()


def _planes(stored: bytes, frame: Frame) -> Iterator[bytes]:
    import zstandard

    nbytes = frame.nbytes // len(frame.parts)
    begin = 0
    for length, is_coded in zip(frame.parts, frame.is_coded, strict=True):
        part = stored[begin : begin + length]
        begin += length
        if not is_coded:
            yield part
            continue
        try:
            # Before anything is allocated for it.
            if zstandard.frame_content_size(part) != nbytes:
                raise CorruptDataError("a zstandard frame has another size than its plane")
            yield zstandard.ZstdDecompressor().decompress(part)
        except zstandard.ZstdError as error:
            raise CorruptDataError(f"a zstandard frame is damaged: {error}") from None


def _damaged(what: str) -> CorruptDataError:
    return CorruptDataError(f"packed file is damaged: {what}")
