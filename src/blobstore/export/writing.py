"""Writing: carry an export plan out. Nothing is decided here.

Every file gets its header and its size, then every piece its bytes at its place, by any thread:
those of blobs are copied by the kernel, values are computed a few megabytes at a time. Memory is
that of one chunk a thread, or of one array a thread where arrays have to be made as a whole.

The values of a piece: a run of a weight, dequantized or converted.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from blobstore import kernels
from blobstore.errors import DigestMismatchError, UnsupportedSourceError, quoted
from blobstore.export.outputs import (
    Convert,
    Copy,
    ExportPlan,
    Made,
    Piece,
    PlannedCopy,
    PlannedShard,
)
from blobstore.io.copying import copy_range
from blobstore.io.durable import (
    PAGE,
    create_file,
    make_folder,
    open_direct,
    os_errors,
    write_aligned,
    write_all_at,
)
from blobstore.io.ranges import FileReader, MappedFile, allow_open_files, close_quietly
from blobstore.io.workers import Progress, each
from blobstore.kernels.arrays import QuantizedArray, numpy_dtype
from blobstore.model.parts import BlobFile, StoredPart
from blobstore.source.reading import tiles_of

_AT_ONCE = 2**20

Array = np.ndarray[Any, Any]


def fill_values(piece: Convert, reader: FileReader, out: Array) -> None:
    """Fill ``out``, flat, with the values: bit for bit those of `Tensor.dequantize`.

    ``reader`` is over the weight's blob.

    Raises: UnsupportedSourceError, with tensor and index, when a finite value is beyond what the
    dtype holds; as `readinto`.
    """
    if piece.transposed:
        _fill_transposed(piece, MappedFile(reader), out)
        return
    stored = _stored(piece, reader)
    if isinstance(stored, QuantizedArray):
        kernels.dequantize_into(stored, out)
    else:
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # a signalling NaN is a value here, not an accident
            np.copyto(out, stored, casting="unsafe")
    found = _first_beyond(
        out, lambda: kernels.dequantize(stored) if isinstance(stored, QuantizedArray) else stored
    )
    if found is not None:
        (place,), exact = found
        index = np.unravel_index(piece.start + place, piece.weight.shape)
        raise _too_large(piece, tuple(int(i) for i in index), exact)


def _first_beyond(values: Array, exact: Callable[[], Array]) -> tuple[tuple[int, ...], Any] | None:
    """Return the index and the exact value of the first value that became infinite; None if all stayed finite."""
    infinite = np.isinf(values)
    if not infinite.any():
        return None
    numbers = exact()
    beyond = infinite & np.isfinite(numbers)
    if not beyond.any():
        return None
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(beyond)), beyond.shape))
    return place, numbers[place]


def _fill_transposed(piece: Convert, file: MappedFile, out: Array) -> None:
    """Fill ``out`` with values of a quantized weight whose last two axes are stored the other way round.

    They lie a row apart there, so the file is mapped and not read; memory is that of ``_AT_ONCE``
    values.
    """
    for tile in tiles_of(piece.start, piece.count, *piece.shape[-2:]):
        stored = _matrix(piece, file, tile.matrix)
        size = stored.group_size
        begin, end = tile.row // size * size, -(-tile.stop_row // size) * size
        place = out[tile.at : tile.at + tile.size].reshape(tile.shape)
        band = max(1, _AT_ONCE // (end - begin))
        for first in range(tile.col, tile.stop_col, band):
            last = min(first + band, tile.stop_col)
            block = kernels.block_of(stored, slice(first, last), slice(begin, end))
            values = kernels.dequantize(block, piece.dtype)
            if (found := _first_beyond(values, partial(kernels.dequantize, block))) is not None:
                (col, row), exact = found
                raise _too_large(
                    piece, (*_lead(piece, tile.matrix), begin + row, first + col), exact
                )
            place[:, first - tile.col : last - tile.col] = values.T[
                tile.row - begin : tile.stop_row - begin
            ]


def _lead(piece: Convert, matrix: int) -> tuple[int, ...]:
    """Return the index of a matrix among those of the weight."""
    lead = piece.weight.shape[:-2]
    return tuple(int(i) for i in np.unravel_index(matrix, lead)) if lead else ()


def _matrix(piece: Convert, file: MappedFile, number: int) -> QuantizedArray[Array]:
    """Return one matrix of a weight as it is stored, in views of the file."""
    quantization = piece.weight.quantization
    if quantization is None:
        raise AssertionError("what is transposed is quantized")
    arrays = {
        suffix: np.frombuffer(
            file.view(part.offset, part.offset + part.nbytes), numpy_dtype(part.dtype)
        ).reshape(part.shape)
        for suffix, part in piece.weight.parts.items()
    }
    stored = QuantizedArray(
        arrays[""], arrays[".scale"], arrays.get(".bias"), arrays.get(".global_scale"), quantization
    )
    return kernels.matrix_of(stored, number)


def _stored(piece: Convert, reader: FileReader) -> Array | QuantizedArray[Array]:
    """Return the run as it is stored: values, or the codes and scales of whole groups."""
    parts, quantization = piece.weight.parts, piece.weight.quantization
    if quantization is None:
        return _read(reader, parts[""], piece.start, piece.count)
    arrays = {}
    for part in quantization.parts((piece.count,), parts[".scale"].dtype):
        (count,) = part.shape
        arrays[part.suffix] = _read(
            reader, parts[part.suffix], piece.start * count // piece.count, count
        )
    factor = _read(reader, parts[".global_scale"], 0, 1) if ".global_scale" in parts else None
    return QuantizedArray(arrays[""], arrays[".scale"], arrays.get(".bias"), factor, quantization)


def _read(reader: FileReader, part: StoredPart, start: int, count: int) -> Array:
    array = np.empty(count, numpy_dtype(part.dtype))
    reader.readinto(part.offset + start * array.itemsize, array.view(np.uint8).data)
    return array


def _too_large(piece: Convert, index: tuple[int, ...], exact: Any) -> UnsupportedSourceError:
    name = piece.weight.name
    message = (
        f"{quoted(name)}: the weight at {list(index)} is {exact}, which does not fit {piece.dtype}"
    )
    hint = "Dequantize to bfloat16 or float32."
    return UnsupportedSourceError(message, tensor=name, index=index, hint=hint)


_COPIED_AT_ONCE = 2**26
_HASHED_AT_ONCE = 2**20
_VALUES_AT_ONCE = 2**20
"""A multiple of every group size."""
_ROWS_AT_ONCE = 128
"""Rows of a transposed weight's values are columns of what is stored: these many are whole groups of every size."""
_WIDEST = 4
"""Bytes of a float32, the widest of the dtypes that values become."""
_BATCH_BYTES = 2**24
_BATCH_PIECES = 256


@dataclass(frozen=True, slots=True)
class _Step:
    """A piece, the place of its bytes in its file, and the array it is of."""

    piece: Piece
    at: int
    array: str


@dataclass(slots=True)
class _File:
    """An open file of the export: ``direct`` is the same file, to be written around the page cache, or -1."""

    shard: PlannedShard
    path: Path
    fd: int
    direct: int


def write_files(plan: ExportPlan, folder: Path, jobs: int, progress: Progress) -> None:
    """Write the plan's files into ``folder`` with ``jobs`` threads; they are not yet durable.

    Raises: the error of the first piece in plan order that fails: CorruptDataError when a blob is
    not the one any more that was opened, or of a file has other bytes, UnsupportedSourceError for a
    value that does not fit, StorageError.
    """
    for document in plan.documents:
        if isinstance(document, PlannedCopy):
            _copy_blob(document, folder / document.path)
        else:
            _write_document(folder / document.path, document.data)
        progress(document.size, document.path)
    allow_open_files(2 * len(plan.shards) + 2 * jobs)
    files: list[_File] = []
    try:
        for shard in plan.shards:
            files.append(_create(shard, folder / shard.path))
            progress(len(shard.header), shard.path)
        batches = (batch for file in files for batch in _batches(file))
        each(batches, _Work(progress).do, jobs, name="export")
    finally:
        with ExitStack() as stack:  # each is closed, also when another can't be
            for file in files:
                stack.callback(_close, file)


def _write_document(path: Path, data: bytes) -> None:
    with os_errors("write", path):
        make_folder(path.parent)
        fd = create_file(path)
        try:
            write_all_at(fd, 0, memoryview(data))
        finally:
            os.close(fd)


def _copy_blob(file: PlannedCopy, path: Path) -> None:
    """Write a file, and hash it on the way: it is small, and nothing else would notice damage in it."""
    hashed = hashlib.sha256()
    with os_errors("write", path):
        make_folder(path.parent)
        fd = create_file(path)
    try:
        with file.blob.open() as reader:
            done = 0
            for piece in reader.pieces(
                memoryview(bytearray(min(_HASHED_AT_ONCE, max(1, file.size))))
            ):
                hashed.update(piece)
                with os_errors("write", path):
                    write_all_at(fd, done, piece)
                done += len(piece)
    finally:
        with os_errors("write", path):
            os.close(fd)
    if hashed.hexdigest() != file.blob.digest.hex:
        message = f"{file.path}: blob {file.blob.digest} is damaged: its bytes are not its digest's"
        raise DigestMismatchError(message, blob=str(file.blob.digest))


def _create(shard: PlannedShard, path: Path) -> _File:
    with os_errors("write", path):
        make_folder(path.parent)
        file = _File(shard, path, create_file(path, shard.size), -1)
        try:
            write_all_at(file.fd, 0, memoryview(shard.header))
            if any(isinstance(piece, Convert) for array in shard.arrays for piece in array.pieces):
                file.direct = open_direct(path)
        except BaseException:
            _close(file)
            raise
    return file


def _close(file: _File) -> None:
    """Close a shard. Raises: StorageError."""
    if file.direct >= 0:
        close_quietly(file.direct)  # nothing that it wrote waits to be written
    with os_errors("write", file.path):
        os.close(file.fd)


class _Work:
    """What the threads of one export share."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._buffers = _Buffers()

    def do(self, batch: tuple[_File, list[_Step]]) -> None:
        """Write the pieces of one batch."""
        file, steps = batch
        with _Blobs() as blobs:
            for step in steps:
                match step.piece:
                    case Copy(weight, offset, nbytes):
                        copy_range(
                            blobs.reader(weight.blob), offset, file.fd, file.path, step.at, nbytes
                        )
                    case Convert():
                        self._convert(
                            step.piece, blobs.reader(step.piece.weight.blob), file, step.at
                        )
                    case Made(_, make):
                        with os_errors("write", file.path):
                            write_all_at(file.fd, step.at, make().reshape(-1).view(np.uint8).data)
                self._progress(step.piece.nbytes, step.array)

    def _convert(self, piece: Convert, reader: FileReader, file: _File, at: int) -> None:
        # A file that was not written by the safetensors library may have its arrays at odd places.
        kind, start = numpy_dtype(piece.dtype), at % PAGE
        is_aligned = at % kind.itemsize == 0
        data = self._buffers.memory()[start if is_aligned else 0 :][: piece.nbytes]
        fill_values(piece, reader, np.frombuffer(data, kind))
        with os_errors("write", file.path):
            write_aligned(file.fd, file.direct if is_aligned else -1, at, data)


class _Buffers(threading.local):
    """Memory of a thread's own, from the beginning of a page on."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    def memory(self) -> memoryview:
        """Return the memory: for a run of values, and a page."""
        if self._memory is None:
            with os_errors("allocate", "memory"):
                self._memory = memoryview(mmap.mmap(-1, _VALUES_AT_ONCE * _WIDEST + PAGE))
        return self._memory


class _Blobs:
    """The blob that a thread reads from; another one is opened when it is needed."""

    def __init__(self) -> None:
        self._open: tuple[BlobFile, FileReader] | None = None

    def reader(self, blob: BlobFile) -> FileReader:
        """Return a reader over the blob. Raises: as `BlobFile.open`."""
        if self._open is None or self._open[0] is not blob:
            self.__exit__()
            self._open = (blob, blob.open())
        return self._open[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _batches(file: _File) -> Iterator[tuple[_File, list[_Step]]]:
    """Yield steps in file order: a large one alone, small ones together."""
    batch: list[_Step] = []
    size = 0
    for step in _steps(file.shard):
        batch.append(step)
        size += step.piece.nbytes
        if size >= _BATCH_BYTES or len(batch) == _BATCH_PIECES:
            yield file, batch
            batch, size = [], 0
    if batch:
        yield file, batch


def _steps(shard: PlannedShard) -> Iterator[_Step]:
    at = len(shard.header)
    for array in shard.arrays:
        for whole in array.pieces:
            for piece in _cut(whole):
                yield _Step(piece, at, array.name)
                at += piece.nbytes


def _cut(piece: Piece) -> Iterator[Piece]:
    """Yield a piece in parts that one thread does at once."""
    if isinstance(piece, Convert):
        most = _values_at_once(piece)
        for start in range(0, piece.count, most):
            yield replace(piece, start=piece.start + start, count=min(most, piece.count - start))
    elif isinstance(piece, Made):
        yield piece
    else:
        for start in range(0, piece.nbytes, _COPIED_AT_ONCE):
            yield replace(
                piece,
                offset=piece.offset + start,
                nbytes=min(_COPIED_AT_ONCE, piece.nbytes - start),
            )


def _values_at_once(piece: Convert) -> int:
    """Return how many values one thread computes at once: of a transposed weight whole rows, in whole groups of them."""
    if not piece.transposed:
        return _VALUES_AT_ONCE
    cols = piece.shape[-1]
    rows = _VALUES_AT_ONCE // cols
    return (rows - rows % _ROWS_AT_ONCE or rows) * cols or _VALUES_AT_ONCE
