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

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from blobstore.errors import CorruptDataError

FRAME_MAGIC: Final = b"\x28\xb5\x2f\xfd"
FOOTER_BYTES: Final = 9
MAX_FRAME: Final = 2**30

_SKIPPABLE_MAGIC = 0x184D2A5E
_SKIPPABLE_BYTES = 8
_TABLE_MAGIC = 0x8F92EAB1
_MAX_FRAMES = 0x8000000
_HAS_CHECKSUMS = 0x80
_RESERVED = 0x7C
_MAX_BLOCK = 2**17
_SINGLE_SEGMENT_4_BYTES = 0xA0
"""A frame header's descriptor: a single segment, whose size has four bytes; no checksum."""


@dataclass(frozen=True, slots=True)
class Footer:
    """The end of a seek table: how many frames it lists, and the bytes of each entry."""

    frames: int
    entry_bytes: int

    @property
    def table_bytes(self) -> int:
        return _SKIPPABLE_BYTES + self.frames * self.entry_bytes + FOOTER_BYTES


def encode_table(frames: Sequence[tuple[int, int]]) -> bytes:
    """Return the seek table of frames, each given as its compressed and decompressed bytes."""
    entries = b"".join(struct.pack("<II", *frame) for frame in frames)
    head = struct.pack("<II", _SKIPPABLE_MAGIC, len(entries) + FOOTER_BYTES)
    return head + entries + struct.pack("<IBI", len(frames), 0, _TABLE_MAGIC)


def parse_footer(data: bytes, what: str) -> Footer | None:
    """Return the footer in a file's last 9 bytes, None if they are not one.

    Raises: CorruptDataError (rule A3).
    """
    frames, descriptor, magic = struct.unpack("<IBI", data)
    if magic != _TABLE_MAGIC:
        return None
    if descriptor & _RESERVED or frames > _MAX_FRAMES:
        raise _invalid(what, "its footer is not valid")
    return Footer(frames, 12 if descriptor & _HAS_CHECKSUMS else 8)


def parse_table(
    data: bytes, footer: Footer, file_size: int, what: str
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the frames of a seek table: where each begins in the file, and where in the contents.

    The last item of each is its end. Raises: CorruptDataError (rule A3).
    """
    if struct.unpack_from("<II", data) != (_SKIPPABLE_MAGIC, len(data) - _SKIPPABLE_BYTES):
        raise _invalid(what, "its frame is not a skippable one")
    places, starts = array("Q", [0]), array("Q", [0])  # millions of frames take little memory
    for begin in range(_SKIPPABLE_BYTES, len(data) - FOOTER_BYTES, footer.entry_bytes):
        compressed, plain = struct.unpack_from("<II", data, begin)
        if plain > MAX_FRAME:
            raise _invalid(what, f"a frame has {plain:,} bytes, at most {MAX_FRAME:,}")
        places.append(places[-1] + compressed)
        starts.append(starts[-1] + plain)
    if places[-1] + len(data) != file_size:
        raise _invalid(what, "its sizes do not add up to the file's")
    return places, starts


def stored_frame(data: memoryview) -> Iterator[bytes | memoryview]:
    """Yield the parts of a frame that holds ``data``, at most 1 GiB, as it is."""
    yield FRAME_MAGIC + struct.pack("<BI", _SINGLE_SEGMENT_4_BYTES, len(data))
    for begin in range(0, max(len(data), 1), _MAX_BLOCK):
        block = data[begin : begin + _MAX_BLOCK]
        is_last = begin + len(block) == len(data)
        yield (len(block) << 3 | is_last).to_bytes(3, "little")
        yield block


def _invalid(what: str, reason: str) -> CorruptDataError:
    return CorruptDataError(f"{what}: not a valid seek table: {reason} (rule A3)", rule="A3")
