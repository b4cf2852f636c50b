"""Changes: what an adapter adds to the values of a weight. Pure.

A BLAS sums in other orders on other machines. So each row of one factor and each column of the
other are rounded to as many bits (25 for rank 8, 23 for 64) as let float64 hold every sum of their
products exactly, in any order. The product is then rounded to float32, as all other results are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from blobstore.kernels.arrays import Array
from blobstore.source.coding import Region
from blobstore.source.folders import SourceTensor

TALL, WIDE, MAGNITUDE = FACTORS = (".tall", ".wide", ".magnitude")
"""The suffixes of an adapter's tensors among those of a weight."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """``scale * tall @ wide``, or its transpose, is added to each matrix of a weight.

    ``tall`` is ``[n, rank]``, ``wide`` ``[rank, m]``. With a magnitude (DoRA), rows get that norm
    afterwards. ``matrix``: which of the adapter's matrices the weight's first one gets.
    """

    rank: int
    scale: float
    transposed: bool = False
    matrix: int = 0

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an adapter's tensors for a weight ``[..., rows, cols]``."""
        *lead, rows, cols = shape
        height, width = (cols, rows) if self.transposed else (rows, cols)
        return {
            TALL: (*lead, height, self.rank),
            WIDE: (*lead, self.rank, width),
            MAGNITUDE: (*lead, rows),
        }

    def regions(
        self, parts: Mapping[str, SourceTensor], matrix: int, rows: range, shape: tuple[int, ...]
    ) -> Iterator[Region]:
        """Yield the bytes of ``parts`` that change ``rows`` of a matrix."""
        axes = {WIDE: 1} if self.transposed else {TALL: 0}
        for suffix, own in self.shapes(shape[-2:]).items():
            if suffix in parts:
                height, width = (*own, 1)[:2]
                spans = [range(height), range(width)]
                if suffix != (TALL if self.transposed else WIDE):
                    spans[axes.get(suffix, 0)] = rows
                item, first = parts[suffix].dtype.bits // 8, (self.matrix + matrix) * height
                lines, columns = spans
                yield Region(
                    suffix,
                    width * item,
                    first + lines.start,
                    first + lines.stop,
                    columns.start * item,
                    columns.stop * item,
                )

    def apply(self, factors: Mapping[str, Array], values: Array, out: Array) -> None:
        """Fill ``out`` with changed rows of values, rounded; their ``factors`` are float32."""
        tall, wide = factors[TALL].reshape(-1, self.rank), factors[WIDE].reshape(self.rank, -1)
        left, right = (wide.T, tall.T) if self.transposed else (tall, wide)
        total = _product(left, right).astype(np.float32)
        total *= np.float32(self.scale)
        total += values
        if MAGNITUDE in factors:
            # In one order: `sum` has others on other machines.
            squares = np.add.accumulate(np.square(total, dtype=np.float64), 1)
            norms = np.sqrt(squares[:, -1:]).astype(np.float32)
            norms[np.isinf(norms)] = np.nan  # as sums that are not finite: values are refused
            total *= factors[MAGNITUDE].reshape(-1, 1) / norms
        out[:] = total


def _product(left: Array, right: Array) -> Array:
    bits = (53 - (left.shape[1] - 1).bit_length()) // 2
    product: Array = _rounded(left, bits, 1) @ _rounded(right, bits, 0)
    return product


def _rounded(factor: Array, bits: int, axis: int) -> Array:
    """Return float64 multiples of powers of two, of ``bits`` beside the largest of each line."""
    _, exponents = np.frexp(np.abs(factor).max(axis, keepdims=True))
    steps = np.ldexp(1.0, exponents - bits)
    rounded: Array = np.rint(factor / steps) * steps
    return rounded
