"""The values of a piece: a run of a weight, dequantized or converted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from blobstore import kernels
from blobstore.arrays import QuantizedArray, numpy_dtype
from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.export.outputs import Convert
from blobstore.export.stored_model import StoredPart
from blobstore.mapped import MappedFile
from blobstore.ranges import FileReader
from blobstore.tiles import tiles_of

_AT_ONCE = 2**20

Array = np.ndarray[Any, Any]


def fill_values(piece: Convert, reader: FileReader, out: Array) -> None:
    """Fill ``out``, flat, with the values: bit for bit those of `Tensor.dequantize`. ``reader`` is over the weight's blob.

    Raises: UnsupportedSourceError, with tensor and index, when a finite value is beyond what the dtype holds; as `readinto`.
    """
    if piece.transposed:
        _fill_transposed(piece, MappedFile(reader), out)
        return
    stored = _stored(piece, reader)
    if isinstance(stored, QuantizedArray):
        kernels.dequantize_into(stored, out)
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # a signalling NaN is a value here, not an accident
            np.copyto(out, stored, casting="unsafe")
    found = _first_beyond(out, lambda: kernels.dequantize(stored) if isinstance(stored, QuantizedArray) else stored)
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

    They lie a row apart there, so the file is mapped and not read; memory is that of ``_AT_ONCE`` values.
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
                raise _too_large(piece, (*_lead(piece, tile.matrix), begin + row, first + col), exact)
            place[:, first - tile.col : last - tile.col] = values.T[tile.row - begin : tile.stop_row - begin]


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
        suffix: np.frombuffer(file.view(part.offset, part.offset + part.nbytes), numpy_dtype(part.dtype)).reshape(part.shape)
        for suffix, part in piece.weight.parts.items()
    }
    stored = QuantizedArray(arrays[""], arrays[".scale"], arrays.get(".bias"), arrays.get(".global_scale"), quantization)
    return kernels.matrix_of(stored, number)


def _stored(piece: Convert, reader: FileReader) -> Array | QuantizedArray[Array]:
    """Return the run as it is stored: values, or the codes and scales of whole groups."""
    parts, quantization = piece.weight.parts, piece.weight.quantization
    if quantization is None:
        return _read(reader, parts[""], piece.start, piece.count)
    arrays = {}
    for part in quantization.parts((piece.count,), parts[".scale"].dtype):
        (count,) = part.shape
        arrays[part.suffix] = _read(reader, parts[part.suffix], piece.start * count // piece.count, count)
    factor = _read(reader, parts[".global_scale"], 0, 1) if ".global_scale" in parts else None
    return QuantizedArray(arrays[""], arrays[".scale"], arrays.get(".bias"), factor, quantization)


def _read(reader: FileReader, part: StoredPart, start: int, count: int) -> Array:
    array = np.empty(count, numpy_dtype(part.dtype))
    reader.readinto(part.offset + start * array.itemsize, array.view(np.uint8).data)
    return array


def _too_large(piece: Convert, index: tuple[int, ...], exact: Any) -> UnsupportedSourceError:
    name = piece.weight.name
    message = f"{quoted(name)}: the weight at {list(index)} is {exact}, which does not fit {piece.dtype}"
    hint = "Dequantize to bfloat16 or float32."
    return UnsupportedSourceError(message, tensor=name, index=index, hint=hint)
