"""Files in zstandard's seekable format, read frame by frame: packed blobs and archives.

A packed file has one blob, with byte planes (docs/formats.md). A frame is up to 1 MiB of the blob:
byte 0 of every item, then byte 1, and so on, so that the exponents of floats lie side by side.
zstandard checks each frame by a checksum of its own.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    LimitExceededError,
)
from blobstore.formats.archives import SeekTable, encode_table, seek_table
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import header_of
from blobstore.io.durable import create_file, os_errors, sync, write_all_at
from blobstore.io.ranges import FileReader, OpenReader, close_quietly
from blobstore.names import Digest
from blobstore.store.sessions import mismatch_error

if TYPE_CHECKING:
    from zstandard import ZstdCompressor, ZstdDecompressor

FRAME = 2**20
"""Bytes of a blob in a frame at most: what is coded, checked and read at once."""

# A skippable frame in front: its magic, its size, ours, and the bytes of an item.
_MARK = struct.Struct("<II7sB")
_SKIPPABLE = (0x184D2A50, 8)
_OURS = b"BSPACK\x02"
_WIDTHS = (1, 2, 4)
_FLOATS = {DType.BF16: 2, DType.F16: 2, DType.F32: 4}
_TEXT_LEVEL = 9
_MAX_WINDOW = 2**27
# Bytes of a header of a tar: of a frame that begins with one, no more is decoded for it.
_HEAD = 512


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a file, each decoded as a whole.

    ``starts``: where the plain bytes of each frame begin; the last item is the end of all.
    ``decoded`` returns those of a frame, ``head`` the first of them without decoding the rest. They
    raise CorruptDataError and StorageError.
    """

    starts: Sequence[int]
    decoded: Callable[[int], bytes]
    close: Callable[[], None]
    head: Callable[[int, int], bytes] = lambda _number, _length: b""


class FramesReader(OpenReader):
    """The plain bytes of all frames. It keeps the frame that it read last; for one thread."""

    identity = None

    def __init__(self, frames: Frames, name: str) -> None:
        self.name = name
        self.size = frames.starts[-1]
        self._frames = frames
        self._last: tuple[int, memoryview] = -1, memoryview(b"")

    def readinto(self, offset: int, buffer: memoryview) -> None:
        self._check(offset, len(buffer))
        number = bisect_right(self._frames.starts, offset) - 1
        if len(buffer) == _HEAD and offset == self._frames.starts[number] < self.size:
            head = self._frames.head(number, _HEAD)
            if len(head) == _HEAD:
                buffer[:] = head
                return
        while buffer:
            number = bisect_right(self._frames.starts, offset) - 1
            if number != self._last[0]:
                self._last = number, memoryview(self._frames.decoded(number))
            piece = self._last[1][offset - self._frames.starts[number] :][: len(buffer)]
            buffer[: len(piece)] = piece
            buffer, offset = buffer[len(piece) :], offset + len(piece)

    def close(self) -> None:
        self._frames.close()


def zstd_frames(file: FileReader, table: SeekTable) -> Frames:
    """Return the frames of a file with a seek table."""
    import zstandard

    places, starts, name = table.places, table.starts, file.name

    def head(number: int, length: int) -> bytes:
        """Return the first bytes of a frame, fewer if that would need most of it."""
        first_block = min(2**17 + 2**10, places[number + 1] - places[number])
        try:
            with decompressor().stream_reader(file.read(places[number], first_block)) as reader:
                return reader.read(length)
        except zstandard.ZstdError as error:
            raise damaged_error(name, error) from error

    def decoded(number: int) -> bytes:
        data = file.read(places[number], places[number + 1] - places[number])
        return _decompressed(data, starts[number + 1] - starts[number], name)

    return Frames(starts, decoded, file.close, head)


def _decompressed(data: bytes, size: int, name: str) -> bytes:
    import zstandard

    try:
        # Before the memory is taken: the library trusts the frame's header.
        nbytes = zstandard.frame_content_size(data)
        if nbytes in (-1, size):
            plain = decompressor().decompress(data, max_output_size=size, allow_extra_data=False)
            nbytes = len(plain)
    except zstandard.ZstdError as error:
        raise damaged_error(name, error) from error
    if nbytes != size:
        raise CorruptDataError(f"{name}: a frame has {nbytes:,} bytes, not {size:,}")
    return plain


def decompressor() -> ZstdDecompressor:
    """Return a decompressor that takes windows up to 128 MiB."""
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)


def damaged_error(name: str, error: Exception) -> CorruptDataError:
    """Return the error of bytes that can't be decompressed."""
    return CorruptDataError(f"{name}: can't be decompressed: {error}", path=name)


# Packed files


def packed_reader(frames: Frames, blob: Digest, path: Path) -> FramesReader:
    """Return a reader of the plain bytes of a packed blob, for one thread.

    It raises CorruptDataError, with ``blob`` and ``path``, for a damaged frame.
    """
    name = f"{path} (blob {blob})"

    def decoded(number: int) -> bytes:
        try:
            return frames.decoded(number)
        except BlobStoreError as error:
            raise error.at(f"packed {name} is damaged", blob=str(blob), path=str(path)) from error

    return FramesReader(replace(frames, decoded=decoded), name)


def packed_frames(file: FileReader) -> Frames:
    """Return the frames of a packed file. Raises: CorruptDataError if it is damaged."""
    mark = file.read(0, min(file.size, _MARK.size)).ljust(_MARK.size)
    *skippable, ours, width = _MARK.unpack(mark)
    if (*skippable, ours) != (*_SKIPPABLE, _OURS) or width not in _WIDTHS:
        raise _damage_error("it does not begin as one")
    table = seek_table(file)
    if table is None or not table.has_small_frames:
        raise _damage_error("it has no seek table of small frames")
    frames = zstd_frames(file, table)

    def decoded(number: int) -> bytes:
        return join_planes(frames.decoded(number), width)

    return Frames(frames.starts, decoded, file.close)


def write_packed(path: Path, blob: Descriptor, reader: OpenReader) -> None:
    """Write the packed file of a blob, check and sync it. Memory: a few frames, and the table.

    It is read back and decoded once. Raises: as ``reader``; DigestMismatchError for a blob that is
    damaged; StorageError.
    """
    with os_errors("create", path):
        fd = create_file(path)
    try:
        offset = 0
        for piece in _pieces(blob, reader):
            with os_errors("write", path):
                write_all_at(fd, offset, memoryview(piece))
            offset += len(piece)
        with FileReader(path) as file:
            packed = packed_reader(packed_frames(file), blob.digest, path)
            if packed.size != blob.size or packed.digest() != blob.digest:
                raise mismatch_error(blob.digest)
        with os_errors("write", path):
            sync(fd)
    finally:
        close_quietly(fd)


def _pieces(blob: Descriptor, reader: OpenReader) -> Iterator[bytes]:
    import zstandard

    width = _width(blob, reader)
    coder = _coder(is_text=blob.media_type != TENSOR_MEDIA_TYPE)
    yield _MARK.pack(*_SKIPPABLE, _OURS, width)
    table = [(_MARK.size, 0)]
    for begin in range(0, reader.size, FRAME):
        data = reader.read(begin, min(FRAME, reader.size - begin))
        stream, frame = coder.compressobj(size=len(data)), b""
        for plane in split_planes(data, width):  # each begins a block, with its own Huffman code
            frame += stream.compress(plane) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        frame += stream.flush()
        table.append((len(frame), len(data)))
        yield frame
    yield encode_table(table)


def split_planes(data: bytes, width: int) -> list[bytes]:
    """Return the bytes of items of ``width`` bytes side by side, so that exponents lie together.

    Plane k has byte k of every item; the last part has the bytes after the last whole item.
    """
    import numpy as np

    whole = len(data) // width * width
    items = np.frombuffer(data, np.uint8, whole).reshape(-1, width)
    return [*(items[:, number].tobytes() for number in range(width)), data[whole:]]


def join_planes(planes: bytes, width: int) -> bytes:
    """Return the items whose planes these are: the reverse of `split_planes`."""
    import numpy as np

    if width == 1:
        return planes
    whole = len(planes) // width * width
    items = np.frombuffer(planes, np.uint8, whole).reshape(width, -1)
    return items.T.tobytes() + planes[whole:]


def _coder(*, is_text: bool) -> ZstdCompressor:
    """Return a compressor, whose frames have their size and a checksum.

    For tensors it is almost a pure Huffman coder: matches of 7 bytes at least, through a table of
    64 entries. Level 1 finds matches among exponents that cost more than they save, at half the
    speed (BF16 to 0.684 instead of 0.670).
    """
    import zstandard

    if is_text:
        return zstandard.ZstdCompressor(level=_TEXT_LEVEL, write_checksum=True)
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        window_log=17,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
        write_content_size=True,
        write_checksum=True,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def _width(blob: Descriptor, reader: OpenReader) -> int:
    """Return the bytes of an item of the floats that fill most of a blob; 1 without floats."""
    if blob.media_type != TENSOR_MEDIA_TYPE:
        return 1
    try:
        tensors = header_of(reader).tensors.values()
    except (CorruptDataError, LimitExceededError):
        return 1
    nbytes: Counter[int] = Counter()
    for entry in tensors:
        if entry.dtype in _FLOATS:
            nbytes[_FLOATS[entry.dtype]] += entry.nbytes
    return max(nbytes, key=nbytes.__getitem__, default=1)


# Packed files of earlier versions, read only: an own container of frames (docs/formats.md).
#
# One holds a large blob or many small ones. The index follows the stored bytes of all frames. A
# frame has planes of rotated bytes, each coded by zstandard or stored, and may be the difference to
# bytes of a base blob.

_MAGIC = b"BSPACK\x01\n"

_END = b"BSPEND\x01\n"
_MAX_INDEX = 2**26
# Offset and length of the index, its sha256, and `_END`.
_TRAILER = struct.Struct("<QQ32s8s")
_COUNTS = struct.Struct("<III")
# A blob: its digest, size and number of frames. A base: its digest and size. A frame.
_TABLES = (struct.Struct("<32sQI"), struct.Struct("<32sQ"), struct.Struct("<IBBHQI4I"))


@dataclass(frozen=True)
class PackedIndex:
    """The frames of each blob of a packed file, by the hex digits of the blob's digest.

    A frame is its place in the file, and its record. ``bases``: the base blobs that they need.
    """

    frames: Mapping[str, Sequence[tuple[int, Sequence[int]]]]
    bases: Sequence[Digest]


def read_index(file: OpenReader) -> PackedIndex | None:
    """Return the index of a packed file of earlier versions, None for one of today's.

    Raises: CorruptDataError if it is damaged or contradictory; StorageError.
    """
    if file.read(0, min(file.size, len(_MAGIC))) != _MAGIC:
        return None
    end = max(file.size - _TRAILER.size, len(_MAGIC))
    trailer = file.read(end, file.size - end).rjust(_TRAILER.size)
    offset, length, sha256, mark = _TRAILER.unpack(trailer)
    if mark != _END or length > _MAX_INDEX or offset + length != end:
        raise _damage_error("its end is not that of a packed file")
    raw = file.read(offset, length)
    if hashlib.sha256(raw).digest() != sha256:
        raise _damage_error("its index is damaged")
    counts = _COUNTS.unpack(raw[: _COUNTS.size].ljust(_COUNTS.size))
    sizes = (table.size * count for table, count in zip(_TABLES, counts, strict=True))
    ends = list(accumulate(sizes, initial=_COUNTS.size))
    if ends[-1] != len(raw):
        raise _damage_error("its index has the wrong length")
    blobs, bases, records = (
        list(table.iter_unpack(raw[slice(*part)]))
        for table, part in zip(_TABLES, pairwise(ends), strict=True)
    )
    stored = [sum(lengths[:width]) for _, width, _, _, _, _, *lengths in records]
    places = accumulate(stored, initial=len(_MAGIC))
    frames = list(zip(places, records, strict=False))
    if len(_MAGIC) + sum(stored) != offset:
        raise _damage_error("its frames do not end where its index begins")
    for nbytes, width, _, base, *_ in records:
        if not 0 < nbytes <= FRAME or width not in _WIDTHS or nbytes % width or base > len(bases):
            raise _damage_error("its index describes an impossible frame")
    rest = iter(frames)
    return PackedIndex(
        {digest.hex(): list(islice(rest, count)) for digest, _, count in blobs},
        [Digest(digest.hex()) for digest, _ in bases],
    )


def blob_frames(
    file: FileReader, index: PackedIndex, digest: str, open_blob: Callable[[Digest], OpenReader]
) -> Frames:
    """Return the frames of one blob of a packed file of earlier versions.

    ``open_blob`` opens the packed blobs that it was packed against.
    """
    frames = index.frames[digest]

    def decoded(number: int) -> bytes:
        place, (nbytes, width, coded, base, base_offset, checksum, *lengths) = frames[number]
        stored, planes = file.read(place, sum(lengths[:width])), b""
        if zlib.crc32(stored) != checksum:
            raise CorruptDataError(f"the bytes at {place:,} do not match their checksum")
        for plane, length in enumerate(lengths[:width]):
            part, stored = stored[:length], stored[length:]
            is_coded = coded >> plane & 1
            planes += _decompressed(part, nbytes // width, file.name) if is_coded else part
        if len(planes) != nbytes:
            raise CorruptDataError("a plane has another size than its frame says")
        if not base:
            return _join_rotated(planes, width, bytes(nbytes))
        with open_blob(index.bases[base - 1]) as reader:
            return _join_rotated(planes, width, reader.read(base_offset, nbytes))

    starts = accumulate((nbytes for _, (nbytes, *_) in frames), initial=0)
    return Frames(list(starts), decoded, file.close)


def _join_rotated(planes: bytes, width: int, base: bytes) -> bytes:
    """Return the items of rotated planes, combined by XOR with as many bytes of ``base``.

    Each little-endian item was rotated left by one bit; plane 0 has the most significant bytes.
    """
    import numpy as np

    items = np.frombuffer(join_planes(planes, width), f">u{width}").astype(f"<u{width}")
    if width > 1:
        items = (items >> 1) | (items << (8 * width - 1))
    return bytes(items ^ np.frombuffer(base, items.dtype))


def _damage_error(what: str) -> CorruptDataError:
    return CorruptDataError(f"packed file is damaged: {what}")
