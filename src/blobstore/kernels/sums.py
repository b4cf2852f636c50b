"""Sums over weights and what they are read back as, and their NumPy twin.

The twin has the operations of compare.h, and the same bits. All arithmetic is float64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blobstore.formats.quant import QuantType
from blobstore.kernels.arrays import Array, QuantizedArray
from blobstore.kernels.scales import decoded_scales

_LANES = 8
_HALF_A_STEP = 0.5
_BEYOND = {QuantType.NVFP4: 7.0, QuantType.MXFP4: 7.0, QuantType.MXFP8: 464.0}
"""Half-way from the largest code to the next value that a longer type would have."""


class Comparison(NamedTuple):
    """Sums over weights ``w`` and what they are read back as, ``r``, in float64.

    Infinite or NaN if a value is, or if no float64 holds the sum. ``max_error``, the largest
    ``|r - w|``, ignores NaN. ``beyond``: how many weights lie half a step or more beyond the codes
    of their group; 0 without groups.
    """

    squared_error: float
    squared_weight: float
    squared_read: float
    product: float
    max_error: float
    beyond: int


def compared(weights: Array, read: Array, beyond: int = 0) -> Comparison:
    """Return the sums over two flat arrays of any float type."""
    with np.errstate(all="ignore"):
        weight, back = weights.astype(np.float64), read.astype(np.float64)
        error = back - weight
        return Comparison(
            _sum(error * error),
            _sum(weight * weight),
            _sum(back * back),
            _sum(weight * back),
            float(np.fmax.reduce(np.abs(error), initial=0)),
            beyond,
        )


def _sum(values: Array) -> float:
    """Return the sum as compare.h adds: value i to lane i % 8, in order; then the lanes."""
    lanes = np.zeros((-(-values.size // _LANES) + 1, _LANES))  # the first row: sums of nothing
    lanes.reshape(-1)[_LANES : _LANES + values.size] = values
    total = np.add.accumulate(lanes, axis=0)[-1]
    while total.size > 1:
        total = total[::2] + total[1::2]
    return float(total[0])


def count_beyond(weights: Array, parts: QuantizedArray[Array], global_scale: float) -> int:
    """Return how many weights lie half a step or more beyond the codes of their group."""
    with np.errstate(all="ignore"):
        rows = weights.astype(np.float64).reshape(-1, parts.group_size)
        if parts.bias is not None:
            scale, bias = (part.astype(np.float64)[:, None] for part in (parts.scale, parts.bias))
            first = bias - _HALF_A_STEP * scale
            last = bias + (2**parts.quant_type.bits - _HALF_A_STEP) * scale
            # As std::min and std::max, whose first argument stays if one is NaN.
            low, high = np.where(last < first, last, first), np.where(first < last, last, first)
            beyond = ((rows <= low) | (rows >= high)) & (scale != 0)
        else:
            scale = decoded_scales(parts.scale, parts.quant_type).astype(np.float64)[:, None]
            limit = _BEYOND[parts.quant_type] * (scale * np.float32(global_scale))
            beyond = (np.abs(rows) >= limit) & (rows != 0)
    return int(np.count_nonzero(beyond))
