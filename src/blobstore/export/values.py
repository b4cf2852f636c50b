"""Values of an export: what a stored weight becomes where its bytes are not copied.

Only an export that computes values imports this file, and NumPy and the kernels with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from blobstore import kernels
from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.export.planned_files import Computed, Weight
from blobstore.formats.dtypes import DType
from blobstore.io.ranges import MappedFile
from blobstore.kernels.arrays import Array, QuantizedArray, dtype_of, mapped, numpy_dtype
from blobstore.model.tensors import MappedBlob, StoredArray, assembled, fill_values
from blobstore.source.weights import tiles_of

VALUES_AT_ONCE = 2**20
"""A multiple of every group size."""
_ROWS_AT_ONCE = 128
"""Rows of a transposed weight are columns of what is stored: a multiple of every group size."""
_BAND_VALUES = 2**20
"""Values of a transposed weight that are dequantized at a time."""


def value_piece(
    weight: Weight, dtype: DType, start: int, count: int, *, transposed: bool = False
) -> Computed:
    """Return ``count`` values of a weight from index ``start`` on, converted to ``dtype``.

    They are counted in the order of the exported tensor. ``transposed``: its last two axes are
    those of the stored one, swapped; only a quantized weight can be. The values are bit for bit
    those of `Tensor.dequantize`. Filling raises: UnsupportedSourceError, with tensor and index,
    when a finite value is beyond the range of the dtype; as `BlobFile.open`.
    """
    itemsize = dtype.nbytes((1,))
    at_once = _whole_rows(weight.stored.shape[-2]) if transposed else VALUES_AT_ONCE

    def fill(begin: int, data: memoryview) -> None:
        with weight.blob.open() as reader:
            blob = MappedBlob(weight.blob, MappedFile(reader))
        stored = assembled(weight.stored, lambda _, entry: blob.array(entry))
        out: Array = np.frombuffer(data, numpy_dtype(dtype))
        write = _fill_transposed if transposed else _fill_run
        write(weight.stored.name, stored, start + begin // itemsize, out)

    return Computed(count * itemsize, itemsize, at_once * itemsize, fill)


def _whole_rows(cols: int) -> int:
    """Return how many values of a transposed weight are computed at once: whole groups of rows."""
    rows = VALUES_AT_ONCE // cols
    return (rows - rows % _ROWS_AT_ONCE or rows) * cols or VALUES_AT_ONCE


def _fill_run(name: str, stored: StoredArray, start: int, out: Array) -> None:
    """Write consecutive values; of a quantized weight they are whole groups."""

    def part_of(part: Array) -> Array:
        first, last = (place * part.size // stored.size for place in (start, start + out.size))
        return part.reshape(-1)[first:last]

    run = mapped(stored, part_of) if isinstance(stored, QuantizedArray) else part_of(stored)
    fill_values(out, run)
    beyond = _first_beyond(
        out, lambda: kernels.dequantize(run) if isinstance(run, QuantizedArray) else run
    )
    if beyond is not None:
        (place,), exact = beyond
        raise _too_large(name, np.unravel_index(start + place, stored.shape), exact, out)


def _first_beyond(values: Array, exact: Callable[[], Array]) -> tuple[tuple[int, ...], Any] | None:
    """Return the index and exact value of the first one that became infinite; None without one."""
    if are_finite(values):
        return None
    infinite = np.isinf(values)
    if not infinite.any():
        return None
    numbers = exact()
    beyond = infinite & np.isfinite(numbers)
    if not beyond.any():
        return None
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(beyond)), beyond.shape))
    return place, numbers[place]


def are_finite(values: Array) -> bool:
    """Return True if no value is infinite or not a number.

    Of the bits of such values, those without a sign are the largest signed integers, and those with
    one the largest unsigned integers. NumPy finds these two 20 times as fast as ml_dtypes tests
    BF16 values, and needs no memory for it.
    """
    size = values.itemsize
    infinity = np.array([np.inf, -np.inf], values.dtype)
    return all(
        values.view(kind).max(initial=0) < bound
        for kind, bound in (
            (f"i{size}", infinity.view(f"i{size}")[0]),
            (f"u{size}", infinity.view(f"u{size}")[1]),
        )
    )


def _fill_transposed(name: str, whole: QuantizedArray[Array], start: int, out: Array) -> None:
    """Write values of a quantized weight whose last two axes are stored the other way round.

    In the file they lie a row apart; memory is that of ``_BAND_VALUES`` values.
    """
    *lead, cols, rows = whole.shape
    for tile in tiles_of(start, out.size, rows, cols):
        stored = kernels.matrix_of(whole, tile.matrix)
        size = stored.group_size
        begin, end = tile.row // size * size, -(-tile.stop_row // size) * size
        place = out[tile.at : tile.at + tile.size].reshape(tile.shape)
        band = max(1, _BAND_VALUES // (end - begin))
        for first in range(tile.col, tile.stop_col, band):
            last = min(first + band, tile.stop_col)
            block = kernels.block_of(stored, slice(first, last), slice(begin, end))
            values = kernels.dequantize(block, dtype_of(out))
            if (beyond := _first_beyond(values, partial(kernels.dequantize, block))) is not None:
                (col, row), exact = beyond
                index = (*np.unravel_index(tile.matrix, lead), begin + row, first + col)
                raise _too_large(name, index, exact, out)
            within = slice(tile.row - begin, tile.stop_row - begin)
            place[:, first - tile.col : last - tile.col] = values.T[within]


def _too_large(name: str, index: tuple[Any, ...], exact: Any, out: Array) -> UnsupportedSourceError:
    at = tuple(int(i) for i in index)
    return UnsupportedSourceError(
        f"{quoted(name)}: the weight at {list(at)} is {exact}, which does not fit {dtype_of(out)}",
        tensor=name,
        index=at,
        hint="Dequantize to bfloat16 or float32.",
    )
