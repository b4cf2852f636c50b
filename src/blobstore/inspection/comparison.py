"""Comparison: how far values are from each other, in sums that can be added chunk by chunk.

The values are a checkpoint's weights and what is stored of them, or those of two stored tensors.
The kernels compute the sums, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from blobstore import kernels
from blobstore.kernels.arrays import Array, QuantizedArray
from blobstore.model.tensors import StoredArray, Tensor

Figure = Annotated[float, float | None]
"""A number; in JSON null for infinity and NaN."""
CHUNK_WEIGHTS = 2**19
"""Weights compared at a time by one thread: a whole number of groups of every type."""
_WHOLE_GROUPS = 128


@dataclass(frozen=True, slots=True)
class Errors:
    """How far values are from each other: sums over weights and what they are read back as.

    Sums of two runs can be added.
    """

    KEYS: ClassVar[tuple[str, ...]] = (
        "weights=count",
        "rmse",
        "relative_rmse",
        "max_error",
        "cosine",
        "saturated",
    )

    count: int = 0
    squared_error: float = 0.0
    squared_weight: float = 0.0
    squared_read: float = 0.0
    product: float = 0.0
    max_error: Figure = 0.0
    saturated_count: int = 0

    @classmethod
    def between(cls, weights: Array, read: StoredArray) -> Errors:
        """Return the sums over flat weights and as many values, stored as an array or in groups.

        Infinite, or NaN, where a value is, or where no float64 holds them.
        """
        return cls(weights.size, *kernels.compare(weights, read))

    @property
    def are_finite(self) -> bool:
        """True if all values were finite; False if one was not, or if a sum is not."""
        return math.isfinite(self.squared_weight) and math.isfinite(self.squared_read)

    def __add__(self, other: Errors) -> Errors:
        return Errors(
            self.count + other.count,
            self.squared_error + other.squared_error,
            self.squared_weight + other.squared_weight,
            self.squared_read + other.squared_read,
            self.product + other.product,
            max(self.max_error, other.max_error),
            self.saturated_count + other.saturated_count,
        )

    @property
    def rmse(self) -> Figure:
        """Root of the mean squared error, in the weights' unit; 0 of no weights."""
        return math.sqrt(self.squared_error / max(1, self.count))

    @property
    def relative_rmse(self) -> float | None:
        """`rmse` over the root mean square of the weights.

        0 if nothing is lost, None if all weights are zero.
        """
        if not self.squared_error:
            return 0.0
        return math.sqrt(self.squared_error / self.squared_weight) if self.squared_weight else None

    @property
    def cosine(self) -> Figure:
        """Cosine of the angle between the weights and the values read back, as vectors.

        1 if they are equal, 0 if either is all zeros.
        """
        if not self.squared_error:
            return 1.0
        lengths = math.sqrt(self.squared_weight) * math.sqrt(self.squared_read)
        return self.product / lengths if lengths else 0.0

    @property
    def saturated(self) -> float:
        """Share of the weights that lie half a step or more beyond the last code of their group."""
        return self.saturated_count / max(1, self.count)


def paired_values(one: Tensor, other: Tensor) -> Iterator[tuple[Array, Array]]:
    """Yield the values of two tensors of one `checkpoint_shape`, chunk by chunk, in the same order.

    Where one of them is transposed and the other is not, that is columns of the one and rows of the
    other.
    """
    if one.transposed is other.transposed:
        count = math.prod(one.shape)
        for start in range(0, count, CHUNK_WEIGHTS):
            size = min(CHUNK_WEIGHTS, count - start)
            yield stored_values(one, start, size), stored_values(other, start, size)
    elif one.transposed:
        yield from ((b, a) for a, b in paired_values(other, one))
    else:
        *lead, rows, cols = one.shape
        most = max(_WHOLE_GROUPS, CHUNK_WEIGHTS // max(cols, 1) // _WHOLE_GROUPS * _WHOLE_GROUPS)
        for matrix in range(math.prod(lead)):
            for row in range(0, rows, most):
                stop = min(row + most, rows)
                yield (
                    stored_values(one, (matrix * rows + row) * cols, (stop - row) * cols),
                    _columns(other, matrix, row, stop),
                )


def checkpoint_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the checkpoint's tensor: the last two axes swapped if transposed."""
    shape = tensor.shape
    return (*shape[:-2], shape[-1], shape[-2]) if tensor.transposed else shape


def _columns(tensor: Tensor, matrix: int, begin: int, end: int) -> Array:
    """Return columns of one matrix of a quantized tensor, column by column, as flat float32."""
    stored = tensor.numpy()
    if not isinstance(stored, QuantizedArray):
        raise AssertionError(f"{tensor.name} is transposed and not quantized")  # noqa: TRY004  # stored.py checks it
    block = kernels.block_of(
        kernels.matrix_of(stored, matrix), slice(0, tensor.shape[-2]), slice(begin, end)
    )
    return kernels.dequantize(block).T.reshape(-1)


def stored_run(stored: StoredArray, start: int, count: int) -> StoredArray:
    """Return ``count`` values from index ``start`` on, whole groups of a quantized array.

    They are flat views.
    """
    if isinstance(stored, QuantizedArray):
        return kernels.group_range(
            stored, start // stored.group_size, (start + count) // stored.group_size
        )
    return stored.reshape(-1)[start : start + count]


def stored_values(tensor: Tensor, start: int, count: int) -> Array:
    """Return ``count`` values of a tensor from index ``start`` on, flat.

    Of a quantized one whole groups, as float32.
    """
    return _values(stored_run(tensor.numpy(), start, count))


def _values(stored: StoredArray) -> Array:
    return kernels.dequantize(stored) if isinstance(stored, QuantizedArray) else stored


def as_float64(stored: StoredArray) -> Array:
    """Return the values as a new float64 array."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is a value here, not an accident
        return _values(stored).astype(np.float64)
