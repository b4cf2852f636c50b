"""The values of a piece: a run of a tensor's weights, dequantized or converted."""

from __future__ import annotations

from typing import Any

import numpy as np

from blobstore import kernels
from blobstore.arrays import QuantizedArray, numpy_dtype
from blobstore.dtypes import DType
from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.export.outputs import Convert

Array = np.ndarray[Any, Any]


def values_of(piece: Convert) -> Array:
    """Return the values as a new flat array: bit for bit those of ``tensor.dequantize(dtype)``. Whole groups only.

    Raises: UnsupportedSourceError, with tensor and index, when a finite value is beyond what the dtype holds.
    """
    values = _values(piece, piece.dtype)
    if (infinite := np.isinf(values)).any():
        exact = _values(piece, DType.F32 if piece.tensor.quantization is not None else piece.tensor.dtype)
        beyond = infinite & np.isfinite(exact)
        if beyond.any():
            first = int(np.argmax(beyond))
            index = tuple(int(i) for i in np.unravel_index(piece.start + first, piece.tensor.shape))
            name = piece.tensor.name
            message = f"{quoted(name)}: the weight at {list(index)} is {exact[first]}, which does not fit {piece.dtype}"
            hint = "Dequantize to bfloat16 or float32."
            raise UnsupportedSourceError(message, tensor=name, index=index, hint=hint)
    return values


def _values(piece: Convert, dtype: DType) -> Array:
    array = piece.tensor.numpy()
    if isinstance(array, QuantizedArray):
        size = array.group_size
        groups = kernels.group_range(array, piece.start // size, (piece.start + piece.count) // size)
        return kernels.dequantize(groups, dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # a signalling NaN is a value here, not an accident
        flat: Array = array.reshape(-1)[piece.start : piece.start + piece.count].astype(numpy_dtype(dtype))
    return flat
