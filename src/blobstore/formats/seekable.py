"""Zstandard's seekable format: frames that are decompressed one by one, and their table.

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
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Protocol

from blobstore.errors import CorruptDataError
from blobstore.io.ranges import FileReader, OpenReader

if TYPE_CHECKING:
    from zstandard import ZstdDecompressor

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

_MAX_WINDOW = 2**27
_MAX_SMALL_FRAME = 2**26
_MAX_TABLE = 2**24
"""Bytes of a seek table: of 2 TB in frames of 1 MiB, or of two million files."""


@dataclass(frozen=True, slots=True)
class Footer:
    """The end of a seek table: how many frames it lists, and the bytes of each entry."""

    frames: int
    entry_bytes: int

    @property
    def table_bytes(self) -> int:
        """Bytes of the whole skippable frame."""
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


class Frames(Protocol):
    """The frames of a file, each decoded as a whole."""

    @property
    def starts(self) -> Sequence[int]:
        """Where the plain bytes of each frame begin; the last item is the end of all."""

    def decoded(self, number: int) -> bytes:
        """Return the plain bytes of a frame. Raises: CorruptDataError; StorageError."""

    def close(self) -> None:
        """Close the file; a second call does nothing."""


class FramesReader(OpenReader):
    """The plain bytes of all frames. It keeps the frame that it read last; for one thread."""

    identity = None

    def __init__(self, frames: Frames, name: str) -> None:
        self.name = name
        self.size = frames.starts[-1]
        self._frames = frames
        self._last: tuple[int, memoryview] = -1, memoryview(b"")

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See `OpenReader`."""
        self._check(offset, len(buffer))
        while buffer:
            number = bisect_right(self._frames.starts, offset) - 1
            if number != self._last[0]:
                self._last = number, memoryview(self._decoded(number))
            piece = self._last[1][offset - self._frames.starts[number] :][: len(buffer)]
            buffer[: len(piece)] = piece
            buffer, offset = buffer[len(piece) :], offset + len(piece)

    def _decoded(self, number: int) -> bytes:
        """Return a frame, whose size is that of the table."""
        return self._frames.decoded(number)


@dataclass(frozen=True, slots=True)
class SeekTable:
    """Where each frame begins in the file, and where in the contents; the last item is the end."""

    places: Sequence[int]
    starts: Sequence[int]

    @property
    def has_small_frames(self) -> bool:
        """True if each frame is small enough to be decompressed as a whole."""
        return all(end - start <= _MAX_SMALL_FRAME for start, end in pairwise(self.starts))


class ZstdFrames:
    """The frames of a file with a seek table. See `Frames`."""

    def __init__(self, file: FileReader, table: SeekTable) -> None:
        self.starts = table.starts
        self.close = file.close
        self._file = file
        self._places = table.places

    def _compressed(self, number: int, most: int | None = None) -> bytes:
        nbytes = self._places[number + 1] - self._places[number]
        return self._file.read(self._places[number], nbytes if most is None else min(most, nbytes))

    def head(self, number: int, length: int) -> bytes:
        """Return the first bytes of a frame, fewer if that would need most of it."""
        import zstandard

        first_block = self._compressed(number, 2**17 + 2**10)
        try:
            with decompressor().stream_reader(first_block) as reader:
                return reader.read(length)
        except zstandard.ZstdError as error:
            raise broken(self._file.name, error) from error

    def decoded(self, number: int) -> bytes:
        """See `Frames`."""
        import zstandard

        name = self._file.name
        size = self.starts[number + 1] - self.starts[number]
        data = self._compressed(number)
        try:
            said = zstandard.frame_content_size(data)
            # Before the memory is taken: the library trusts the frame's header.
            if said not in (-1, size):
                raise CorruptDataError(f"{name}: a frame has {said:,} bytes, not {size:,}")
            plain = decompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise broken(name, error) from error
        if len(plain) != size:
            raise CorruptDataError(f"{name}: a frame has {len(plain):,} bytes, not {size:,}")
        return plain


def seek_table(file: FileReader) -> SeekTable | None:
    """Return where the frames of a file begin; None without a table of at most 16 MiB.

    Raises: CorruptDataError (rule A3).
    """
    if file.size < FOOTER_BYTES:
        return None
    footer = parse_footer(file.read(file.size - FOOTER_BYTES, FOOTER_BYTES), file.name)
    if footer is None or (footer.table_bytes > _MAX_TABLE and footer.table_bytes <= file.size):
        return None
    if footer.table_bytes > file.size:
        raise _false_table(file.name, "it is longer than the file")
    table = file.read(file.size - footer.table_bytes, footer.table_bytes)
    places, starts = parse_table(table, footer, file.size, file.name)
    for (place, next_place), (start, end) in zip(pairwise(places), pairwise(starts), strict=True):
        if next_place - place > _longest(end - start):
            raise _false_table(file.name, f"a frame of {end - start:,} bytes can't take that many")
    return SeekTable(places, starts)


def _longest(nbytes: int) -> int:
    """Return the most bytes that a frame of ``nbytes`` may take (zstd.h `ZSTD_compressBound`)."""
    return nbytes + nbytes // 256 + 2**12


def _false_table(name: str, problem: str) -> CorruptDataError:
    message = f"{name}: not a valid seek table: {problem} (rule A3)"
    return CorruptDataError(message, rule="A3", path=name)


def decompressor() -> ZstdDecompressor:
    """Return a decompressor that takes windows up to 128 MiB."""
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)


def broken(name: str, error: Exception) -> CorruptDataError:
    """Return the error of bytes that can't be decompressed."""
    return CorruptDataError(f"{name}: can't be decompressed: {error}", path=name)


def _invalid(what: str, reason: str) -> CorruptDataError:
    return CorruptDataError(f"{what}: not a valid seek table: {reason} (rule A3)", rule="A3")
