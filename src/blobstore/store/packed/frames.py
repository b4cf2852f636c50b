"""Files in zstandard's seekable format, read frame by frame: packed blobs and archives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from blobstore.errors import CorruptDataError
from blobstore.formats.seekable import FOOTER_BYTES, parse_footer, parse_table
from blobstore.io.ranges import FileReader, OpenReader

if TYPE_CHECKING:
    from zstandard import ZstdDecompressor

_MAX_WINDOW = 2**27
_MAX_SMALL_FRAME = 2**26
_MAX_TABLE = 2**24
"""Bytes of a seek table: of 2 TB in frames of 1 MiB, or of two million files."""


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
