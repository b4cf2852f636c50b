"""Packed files: one blob, in zstandard's seekable format, with byte planes (docs/formats.md).

A frame is up to 1 MiB of the blob: byte 0 of every item, then byte 1, and so on, so that the
exponents of floats lie side by side. zstandard checks each frame by a checksum of its own.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
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
from blobstore.formats.safetensors.codec import header_of
from blobstore.formats.seekable import encode_table
from blobstore.io.durable import create_file, os_errors, sync, write_all_at
from blobstore.io.ranges import FileReader, OpenReader, close_quietly
from blobstore.names import Digest
from blobstore.store.packed import before
from blobstore.store.packed.frames import Frames, FramesReader, ZstdFrames, seek_table

if TYPE_CHECKING:
    from zstandard import ZstdCompressor

FRAME = 2**20
"""Bytes of a blob in a frame at most: what is coded, checked and read at once."""

_MARK = struct.Struct("<II7sB")
"""A skippable frame in front: its magic, its size, ours, and the bytes of an item."""
_SKIPPABLE = (0x184D2A50, 8)
_OURS = b"BSPACK\x02"
_WIDTHS = (1, 2, 4)
_FLOATS = {DType.BF16: 2, DType.F16: 2, DType.F32: 4}
_TEXT_LEVEL = 9


class PackedReader(FramesReader):
    """The plain bytes of a packed blob, for one thread; it closes its file.

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

    def close(self) -> None:
        """See `OpenReader`."""
        self._frames.close()


class _PlaneFrames:
    """The frames of a packed file. See `Frames`."""

    def __init__(self, frames: ZstdFrames, width: int) -> None:
        self.starts = frames.starts
        self._frames = frames
        self._width = width
        self.close = frames.close

    def decoded(self, number: int) -> bytes:
        """See `Frames`."""
        from blobstore.kernels.planes import join_planes

        return join_planes(self._frames.decoded(number), self._width)


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
    return _PlaneFrames(ZstdFrames(file, table), width)


def index_of_before(file: FileReader) -> before.PackedIndex | None:
    """Return the index of a packed file of earlier versions, None for one of today's.

    Raises: CorruptDataError; StorageError.
    """
    begin = file.read(0, min(file.size, len(before.MAGIC)))
    return before.read_index(file) if begin == before.MAGIC else None


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
    """Yield the bytes of a packed file: the mark, the frames, the seek table."""
    from blobstore.kernels.planes import split_planes

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
