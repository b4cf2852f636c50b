"""The values of a piece: a run of a weight, dequantized or converted."""

from __future__ import annotations

from typing import Any

import numpy as np

from blobstore import kernels
from blobstore.arrays import QuantizedArray, numpy_dtype
from blobstore.dtypes import DType
from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.export.outputs import Convert
from blobstore.export.stored_model import StoredPart
from blobstore.ranges import FileReader

Array = np.ndarray[Any, Any]


def fill_values(piece: Convert, reader: FileReader, out: Array) -> None:
    """Fill ``out``, flat, with the values: bit for bit those of `Tensor.dequantize`. ``reader`` is over the weight's blob.

    Raises: UnsupportedSourceError, with tensor and index, when a finite value is beyond what the dtype holds; as `readinto`.
    """
    stored = _stored(piece, reader)
    if isinstance(stored, QuantizedArray):
        kernels.dequantize_into(stored, out)
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # a signalling NaN is a value here, not an accident
            np.copyto(out, stored, casting="unsafe")
    infinite = np.isinf(out)
    if infinite.any():
        exact = kernels.dequantize(stored, DType.F32) if isinstance(stored, QuantizedArray) else stored
        beyond = infinite & np.isfinite(exact)
        if beyond.any():
            raise _too_large(piece, int(np.argmax(beyond)), exact)


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


def _too_large(piece: Convert, place: int, exact: Array) -> UnsupportedSourceError:
    name = piece.weight.name
    index = tuple(int(i) for i in np.unravel_index(piece.start + place, piece.weight.shape))
    message = f"{quoted(name)}: the weight at {list(index)} is {exact[place]}, which does not fit {piece.dtype}"
    hint = "Dequantize to bfloat16 or float32."
    return UnsupportedSourceError(message, tensor=name, index=index, hint=hint)
