"""Zstandard's seekable format: frames that are decompressed one by one, and their table. Pure.

A file is a row of frames, and a skippable frame at its end, the *seek table*: the compressed and
the decompressed size of each frame. Other programs skip it. Checksums in a
table are not checked: blobs have digests.

Rule A3: the sizes in a seek table add up to the file's, and no frame has more than 1 GiB.

A frame of *stored* bytes has raw blocks only, which cost no compression.

Sources: facebook/zstd contrib/seekable_format/zstd_seekable_compression_format.md (version 0.1.0);
zstd_seekable.h ``ZSTD_SEEKABLE_MAX_FRAME_DECOMPRESSED_SIZE``; RFC 8878 sections 3.1.1 (frame
header, blocks) and 3.1.2 (skippable frames).
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from blobstore.errors import CorruptDataError
from blobstore.io.ranges import OpenReader

FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_MAX_FRAME = 2**30
_MAX_SMALL_FRAME = 2**26
# Bytes of a seek table: of 2 TB in frames of 1 MiB, or of two million files.
_MAX_TABLE = 2**24

_FOOTER = struct.Struct("<IBI")
_SKIPPABLE_MAGIC = 0x184D2A5E
_SKIPPABLE_BYTES = 8
_TABLE_MAGIC = 0x8F92EAB1
_MAX_FRAMES = 0x8000000
_HAS_CHECKSUMS = 0x80
_RESERVED = 0x7C
_MAX_BLOCK = 2**17
# A frame header's descriptor: a single segment, whose size has four bytes; no checksum.
_SINGLE_SEGMENT_4_BYTES = 0xA0


@dataclass(frozen=True, slots=True)
class SeekTable:
    """Where each frame begins in the file, and where in the contents; the last item is the end."""

    places: Sequence[int]
    starts: Sequence[int]

    @property
    def has_small_frames(self) -> bool:
        """True if each frame is small enough to be decompressed as a whole."""
        return all(end - start <= _MAX_SMALL_FRAME for start, end in pairwise(self.starts))


def encode_table(frames: Sequence[tuple[int, int]]) -> bytes:
    """Return the seek table of frames, each given as its compressed and decompressed bytes."""
    entries = b"".join(struct.pack("<II", *frame) for frame in frames)
    head = struct.pack("<II", _SKIPPABLE_MAGIC, len(entries) + _FOOTER.size)
    return head + entries + _FOOTER.pack(len(frames), 0, _TABLE_MAGIC)


def seek_table(file: OpenReader) -> SeekTable | None:
    """Return where the frames of a file begin; None without a table of at most 16 MiB.

    Raises: CorruptDataError (rule A3).
    """
    if file.size < _FOOTER.size:
        return None
    count, flags, magic = _FOOTER.unpack(file.read(file.size - _FOOTER.size, _FOOTER.size))
    if magic != _TABLE_MAGIC:
        return None
    if flags & _RESERVED or count > _MAX_FRAMES:
        raise false_table(file.name, "its footer is not valid")
    entry_bytes = 12 if flags & _HAS_CHECKSUMS else 8
    nbytes = _SKIPPABLE_BYTES + count * entry_bytes + _FOOTER.size
    if nbytes > file.size:
        raise false_table(file.name, "it is longer than the file")
    if nbytes > _MAX_TABLE:
        return None
    table = _table(file.read(file.size - nbytes, nbytes), entry_bytes, file.name)
    if table.places[-1] + nbytes != file.size:
        raise false_table(file.name, "its sizes do not add up to the file's")
    return table


def _table(data: bytes, entry_bytes: int, name: str) -> SeekTable:
    if struct.unpack_from("<II", data) != (_SKIPPABLE_MAGIC, len(data) - _SKIPPABLE_BYTES):
        raise false_table(name, "its frame is not a skippable frame")
    places, starts = array("Q", [0]), array("Q", [0])  # millions of frames take little memory
    for begin in range(_SKIPPABLE_BYTES, len(data) - _FOOTER.size, entry_bytes):
        compressed, plain = struct.unpack_from("<II", data, begin)
        if plain > _MAX_FRAME:
            raise false_table(name, f"a frame has {plain:,} bytes, at most {_MAX_FRAME:,}")
        if compressed > plain + plain // 256 + 2**12:  # zstd.h `ZSTD_compressBound`
            raise false_table(name, f"a frame of {plain:,} bytes can't take {compressed:,}")
        places.append(places[-1] + compressed)
        starts.append(starts[-1] + plain)
    return SeekTable(places, starts)


def false_table(name: str, problem: str) -> CorruptDataError:
    """Return the error of a seek table that is not valid."""
    message = f"{name}: not a valid seek table: {problem} (rule A3)"
    return CorruptDataError(message, rule="A3", path=name)


def stored_frame(data: memoryview) -> Iterator[bytes | memoryview]:
    """Yield the parts of a frame that holds ``data``, at most 1 GiB, as it is."""
    yield FRAME_MAGIC + struct.pack("<BI", _SINGLE_SEGMENT_4_BYTES, len(data))
    for begin in range(0, max(len(data), 1), _MAX_BLOCK):
        block = data[begin : begin + _MAX_BLOCK]
        is_last = begin + len(block) == len(data)
        yield (len(block) << 3 | is_last).to_bytes(3, "little")
        yield block
