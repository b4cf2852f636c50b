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
from blobstore.export.planned_files import ValueRange
from blobstore.io.ranges import FileReader, MappedFile
from blobstore.kernels.arrays import Array, QuantizedArray, numpy_dtype
from blobstore.model.tensors import MappedBlob, assembled, fill_values, read_run
from blobstore.source.weights import tiles_of

_BAND_VALUES = 2**20
"""Values of a transposed weight that are dequantized at a time."""


def fill_range(piece: ValueRange, reader: FileReader, data: memoryview) -> None:
    """Write the values into ``data``, bit for bit those of `Tensor.dequantize`.

    ``reader`` reads the weight's blob. ``data`` are the bytes of the piece, in memory of any
    alignment.

    Raises: UnsupportedSourceError, with tensor and index, when a finite value is beyond the range
    of the dtype; as `readinto`.
    """
    out: Array = np.frombuffer(data, numpy_dtype(piece.dtype))
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
