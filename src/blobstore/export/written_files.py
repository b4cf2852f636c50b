"""Written files: an export plan becomes files. Nothing is decided here.

Every file gets its header and its size, then every piece its bytes at its place, by any thread:
bytes of blobs are copied by the kernel, values are computed a few megabytes at a time. Memory is
that of one chunk a thread, or of one array a thread where arrays have to be made as a whole.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from blobstore import kernels
from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.export.planned_files import (
    BlobRange,
    CopiedBlob,
    ExportPlan,
    MadeArray,
    Piece,
    PlannedShard,
    ValueRange,
)
from blobstore.io.budget import allow_open_files
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
from blobstore.io.ranges import FileReader, MappedFile, close_quietly
from blobstore.io.workers import Progress, each
from blobstore.kernels.arrays import Array, QuantizedArray, numpy_dtype
from blobstore.model.tensors import MappedBlob, assembled, fill_values, read_run
from blobstore.source.weights import tiles_of
from blobstore.store.stored_model import BlobFile, damaged

_BAND_VALUES = 2**20
"""Values of a transposed weight that are dequantized at a time."""
_COPIED_AT_ONCE = 2**26
_VALUES_AT_ONCE = 2**20
"""A multiple of every group size."""
_ROWS_AT_ONCE = 128
"""Rows of a transposed weight are columns of what is stored: a multiple of every group size."""
_WIDEST = 4
"""Bytes of a float32, the widest of the dtypes that values become."""
_BATCH_BYTES = 2**24
_BATCH_PIECES = 256


def fill_range(piece: ValueRange, reader: FileReader, out: Array) -> None:
    """Write the values into ``out``, flat: bit for bit those of `Tensor.dequantize`.

    ``reader`` reads the weight's blob.

    Raises: UnsupportedSourceError, with tensor and index, when a finite value is beyond the range
    of the dtype; as `readinto`.
    """
    if piece.transposed:
        _fill_transposed(piece, MappedBlob(piece.weight.blob, MappedFile(reader)), out)
        return
    weight = piece.weight
    stored = read_run(weight.stored, weight.blob, reader, piece.start, piece.count)
    fill_values(out, stored)
    found = _first_beyond(
        out, lambda: kernels.dequantize(stored) if isinstance(stored, QuantizedArray) else stored
    )
    if found is not None:
        (place,), exact = found
        raise _too_large(piece, np.unravel_index(piece.start + place, weight.stored.shape), exact)


def _first_beyond(values: Array, exact: Callable[[], Array]) -> tuple[tuple[int, ...], Any] | None:
    """Return the index and exact value of the first one that became infinite; None without one."""
    infinite = np.isinf(values)
    if not infinite.any():
        return None
    numbers = exact()
    beyond = infinite & np.isfinite(numbers)
    if not beyond.any():
        return None
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(beyond)), beyond.shape))
    return place, numbers[place]


def _fill_transposed(piece: ValueRange, blob: MappedBlob, out: Array) -> None:
    """Write values of a quantized weight whose last two axes are stored the other way round.

    In the file they lie a row apart, so it is mapped and not read; memory is that of
    ``_BAND_VALUES`` values.
    """
    whole = assembled(piece.weight.stored, lambda _, entry: blob.array(entry))
    lead = piece.weight.stored.shape[:-2]
    for tile in tiles_of(piece.start, piece.count, *piece.shape[-2:]):
        stored = kernels.matrix_of(whole, tile.matrix)
        size = stored.group_size
        begin, end = tile.row // size * size, -(-tile.stop_row // size) * size
        place = out[tile.at : tile.at + tile.size].reshape(tile.shape)
        band = max(1, _BAND_VALUES // (end - begin))
        for first in range(tile.col, tile.stop_col, band):
            last = min(first + band, tile.stop_col)
            block = kernels.block_of(stored, slice(first, last), slice(begin, end))
            values = kernels.dequantize(block, piece.dtype)
            if (found := _first_beyond(values, partial(kernels.dequantize, block))) is not None:
                (col, row), exact = found
                index = (*np.unravel_index(tile.matrix, lead), begin + row, first + col)
                raise _too_large(piece, index, exact)
            rows = slice(tile.row - begin, tile.stop_row - begin)
            place[:, first - tile.col : last - tile.col] = values.T[rows]


def _too_large(piece: ValueRange, index: tuple[Any, ...], exact: Any) -> UnsupportedSourceError:
    name, at = piece.weight.stored.name, tuple(int(i) for i in index)
    return UnsupportedSourceError(
        f"{quoted(name)}: the weight at {list(at)} is {exact}, which does not fit {piece.dtype}",
        tensor=name,
        index=at,
        hint="Dequantize to bfloat16 or float32.",
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """A piece, the place of its bytes in its file, and the array it is of."""

    piece: Piece
    at: int
    array: str


@dataclass(slots=True)
class _File:
    """An open file of the export.

    ``direct`` is the same file, to be written around the page cache, or -1.
    """

    shard: PlannedShard
    path: Path
    fd: int
    direct: int


def write_files(plan: ExportPlan, folder: Path, jobs: int, progress: Progress) -> None:
    """Write the plan's files into ``folder`` with ``jobs`` threads; they are not yet durable.

    Raises: the error of the first piece in plan order that fails: CorruptDataError when a blob was
    replaced since, or the bytes of a file are damaged; UnsupportedSourceError for a value that does
    not fit; StorageError.
    """
    for document in plan.documents:
        path = folder / document.path
        if isinstance(document, CopiedBlob):
            _copy_blob(document, path)
        else:
            with _created(path) as fd, os_errors("write", path):
                write_all_at(fd, 0, memoryview(document.data))
        progress(document.size, document.path)
    allow_open_files(2 * len(plan.shards) + 2 * jobs)
    with ExitStack() as stack:
        files: list[_File] = []
        for shard in plan.shards:
            files.append(stack.enter_context(_opened(shard, folder / shard.path)))
            progress(len(shard.header), shard.path)
        batches = (batch for file in files for batch in _batches(file))
        each(batches, _Work(progress).do, jobs, name="export")


@contextmanager
def _created(path: Path, size: int = 0) -> Iterator[int]:
    """Yield a new file, open; its folder is made too. Raises: StorageError, also for closing it."""
    with os_errors("write", path):
        make_folder(path.parent)
        fd = create_file(path, size)
    try:
        yield fd
    finally:
        with os_errors("write", path):
            os.close(fd)


def _copy_blob(file: CopiedBlob, path: Path) -> None:
    with file.blob.open() as reader:
        if reader.digest() != file.blob.digest:  # nothing else would find damage in it
            raise damaged(file.blob.digest).at(file.path)
        with _created(path) as fd:
            copy_range(reader, 0, fd, path, 0, file.size)


@contextmanager
def _opened(shard: PlannedShard, path: Path) -> Iterator[_File]:
    pieces = [piece for array in shard.arrays for piece in array.pieces]
    with _created(path, shard.size) as fd, ExitStack() as stack:
        file = _File(shard, path, fd, -1)
        with os_errors("write", path):
            write_all_at(fd, 0, memoryview(shard.header))
            if any(isinstance(piece, ValueRange) for piece in pieces):
                file.direct = open_direct(path)
        if file.direct >= 0:
            stack.callback(close_quietly, file.direct)  # nothing that it wrote waits
        yield file


class _Work:
    """The state that the threads of one export share."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._local = threading.local()

    def do(self, batch: tuple[_File, list[_Step]]) -> None:
        """Write the pieces of one batch."""
        file, steps = batch
        for blob, group in itertools.groupby(steps, key=_blob_of):
            with nullcontext() if blob is None else blob.open() as reader:
                for step in group:
                    self._write(step, reader, file)
                    self._progress(step.piece.nbytes, step.array)

    def _write(self, step: _Step, reader: FileReader | None, file: _File) -> None:
        match step.piece:
            case BlobRange(_, offset, nbytes) if reader is not None:
                copy_range(reader, offset, file.fd, file.path, step.at, nbytes)
            case ValueRange() as piece if reader is not None:
                self._convert(piece, reader, file, step.at)
            case MadeArray(_, make):
                with os_errors("write", file.path):
                    write_all_at(file.fd, step.at, make().reshape(-1).view(np.uint8).data)

    def _convert(self, piece: ValueRange, reader: FileReader, file: _File, at: int) -> None:
        # A file that was not written by the safetensors library may have its arrays at odd places.
        kind, start = numpy_dtype(piece.dtype), at % PAGE
        is_aligned = at % kind.itemsize == 0
        data = self._memory()[start if is_aligned else 0 :][: piece.nbytes]
        fill_range(piece, reader, np.frombuffer(data, kind))
        with os_errors("write", file.path):
            write_aligned(file.fd, file.direct if is_aligned else -1, at, data)

    def _memory(self) -> memoryview:
        """Return memory of the thread: for a run of values and a page, from a page's beginning."""
        if not hasattr(self._local, "memory"):
            with os_errors("allocate", "memory"):
                self._local.memory = memoryview(mmap.mmap(-1, _VALUES_AT_ONCE * _WIDEST + PAGE))
        memory: memoryview = self._local.memory
        return memory


def _blob_of(step: _Step) -> BlobFile | None:
    return None if isinstance(step.piece, MadeArray) else step.piece.weight.blob


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
    if isinstance(piece, ValueRange):
        most = _values_at_once(piece)
        for start in range(0, piece.count, most):
            yield replace(piece, start=piece.start + start, count=min(most, piece.count - start))
    elif isinstance(piece, MadeArray):
        yield piece
    else:
        for start in range(0, piece.nbytes, _COPIED_AT_ONCE):
            yield replace(
                piece,
                offset=piece.offset + start,
                nbytes=min(_COPIED_AT_ONCE, piece.nbytes - start),
            )


def _values_at_once(piece: ValueRange) -> int:
    """Return how many values one thread computes at once.

    Of a transposed weight they are whole rows, in whole groups of them.
    """
    if not piece.transposed:
        return _VALUES_AT_ONCE
    cols = piece.shape[-1]
    rows = _VALUES_AT_ONCE // cols
    return (rows - rows % _ROWS_AT_ONCE or rows) * cols or _VALUES_AT_ONCE
