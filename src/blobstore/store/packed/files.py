"""Files in zstandard's seekable format, read frame by frame: packed blobs and archives.

A packed file has one blob, with byte planes (docs/formats.md). A frame is up to 1 MiB of the blob:
byte 0 of every item, then byte 1, and so on, so that the exponents of floats lie side by side.
zstandard checks each frame by a checksum of its own.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    DigestMismatchError,
    LimitExceededError,
)
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import header_of
from blobstore.formats.seekable import SeekTable, encode_table, seek_table
from blobstore.io.durable import create_file, os_errors, sync, write_all_at
from blobstore.io.ranges import FileReader, OpenReader, close_quietly
from blobstore.names import Digest

if TYPE_CHECKING:
    from zstandard import ZstdCompressor, ZstdDecompressor

FRAME = 2**20
"""Bytes of a blob in a frame at most: what is coded, checked and read at once."""

_MARK = struct.Struct("<II7sB")
"""A skippable frame in front: its magic, its size, ours, and the bytes of an item."""
_SKIPPABLE = (0x184D2A50, 8)
_OURS = b"BSPACK\x02"
_WIDTHS = (1, 2, 4)
_FLOATS = {DType.BF16: 2, DType.F16: 2, DType.F32: 4}
_TEXT_LEVEL = 9
_MAX_WINDOW = 2**27


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a file, each decoded as a whole.

    ``starts``: where the plain bytes of each frame begin; the last item is the end of all.
    ``decoded`` returns those of a frame; it raises CorruptDataError and StorageError.
    """

    starts: Sequence[int]
    decoded: Callable[[int], bytes]
    close: Callable[[], None]


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
        while buffer:
            number = bisect_right(self._frames.starts, offset) - 1
            if number != self._last[0]:
                self._last = number, memoryview(self._decoded(number))
            piece = self._last[1][offset - self._frames.starts[number] :][: len(buffer)]
            buffer[: len(piece)] = piece
            buffer, offset = buffer[len(piece) :], offset + len(piece)

    def _decoded(self, number: int) -> bytes:
        return self._frames.decoded(number)

    def close(self) -> None:
        self._frames.close()


class ZstdFrames:
    """The frames of a file with a seek table."""

    def __init__(self, file: FileReader, table: SeekTable) -> None:
        self.starts = table.starts
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


def decompressor() -> ZstdDecompressor:
    """Return a decompressor that takes windows up to 128 MiB."""
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)


def broken(name: str, error: Exception) -> CorruptDataError:
    """Return the error of bytes that can't be decompressed."""
    return CorruptDataError(f"{name}: can't be decompressed: {error}", path=name)


# Packed files


class PackedReader(FramesReader):
    """The plain bytes of a packed blob, for one thread.

    Raises: CorruptDataError, with ``blob`` and ``path``, for a damaged frame.
    """

    def __init__(self, frames: Frames, blob: Digest, path: Path) -> None:
        super().__init__(frames, f"{path} (blob {blob})")
        self._place = {"blob": str(blob), "path": str(path)}

    def _decoded(self, number: int) -> bytes:
        try:
            return super()._decoded(number)
        except BlobStoreError as error:
            raise error.at(f"packed {self.name} is damaged", **self._place) from error


def packed_frames(file: FileReader) -> Frames:
    """Return the frames of a packed file. Raises: CorruptDataError if it is damaged."""
    if file.size < _MARK.size:
        raise CorruptDataError("packed file is damaged: it does not begin as one")
    *skippable, ours, width = _MARK.unpack(file.read(0, _MARK.size))
    if (*skippable, ours) != (*_SKIPPABLE, _OURS) or width not in _WIDTHS:
        raise CorruptDataError("packed file is damaged: it does not begin as one")
    table = seek_table(file)
    if table is None or not table.has_small_frames:
        raise CorruptDataError("packed file is damaged: it has no seek table of small frames")
    frames = ZstdFrames(file, table)

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
            packed = PackedReader(packed_frames(file), blob.digest, path)
            if packed.size != blob.size or packed.digest() != blob.digest:
                message = f"blob {blob.digest} is damaged: its bytes do not match its digest"
                raise DigestMismatchError(message, blob=str(blob.digest))
        with os_errors("write", path):
            sync(fd)
    finally:
        close_quietly(fd)


def _pieces(blob: Descriptor, reader: OpenReader) -> Iterator[bytes]:
    width = _width(blob, reader)
    coder = _coder(is_text=blob.media_type != TENSOR_MEDIA_TYPE)
    yield _MARK.pack(*_SKIPPABLE, _OURS, width)
    table = [(_MARK.size, 0)]
    for begin in range(0, reader.size, FRAME):
        data = reader.read(begin, min(FRAME, reader.size - begin))
        frame = _compressed(split_planes(data, width), coder)
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


def _compressed(planes: Sequence[bytes], coder: ZstdCompressor) -> bytes:
    """Return a frame of planes. Each begins a block, and so has a Huffman code of its own."""
    import zstandard

    stream = coder.compressobj(size=sum(map(len, planes)))
    parts = []
    for plane in planes:
        parts += [stream.compress(plane), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*parts, stream.flush()])


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
