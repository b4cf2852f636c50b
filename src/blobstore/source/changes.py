"""Changes: what an adapter adds to the values of a weight, in float32. Pure.

Ranks are summed in their order by elementwise operations: a BLAS would sum in other orders on other
machines. It takes 0.4 ns for each rank of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from blobstore.kernels.arrays import Array
from blobstore.source.coding import Region
from blobstore.source.folders import SourceTensor

TALL, WIDE, MAGNITUDE = FACTORS = (".tall", ".wide", ".magnitude")
"""The suffixes of an adapter's tensors among those of a weight."""
_BLOCK = 2**16
"""Values that are summed at a time: they stay in a core's cache."""


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
        number, (height, width) = self.matrix + matrix, shape[-2:]
        lines, columns = rows, range(width)
        if self.transposed:
            height, width, lines, columns = width, height, columns, lines
        item, begin = parts[WIDE].dtype.bits // 8, number * self.rank
        yield Region(
            WIDE, width * item, begin, begin + self.rank, columns.start * item, columns.stop * item
        )
        for suffix, run, of, values in (
            (TALL, lines, height, self.rank),
            (MAGNITUDE, rows, shape[-2], 1),
        ):
            if suffix in parts:
                line, first = values * parts[suffix].dtype.bits // 8, number * of
                yield Region.lines(suffix, line, first + run.start, first + run.stop)

    def apply(self, factors: Mapping[str, Array], values: Array, out: Array) -> None:
        """Fill ``out`` with changed rows of values, rounded; their ``factors`` are float32."""
        wide, tall = factors[WIDE].reshape(self.rank, -1), factors[TALL].reshape(-1, self.rank)
        left, right = (wide.T, np.ascontiguousarray(tall.T)) if self.transposed else (tall, wide)
        step = max(1, _BLOCK // values.shape[1])
        for first in range(0, len(values), step):
            rows = slice(first, first + step)
            product = np.empty(values[rows].shape, np.float32)
            total = np.zeros_like(product)
            for number in range(self.rank):
                np.multiply(left[rows, number, None], right[number], out=product)
                total += product
            total *= np.float32(self.scale)
            total += values[rows].astype(np.float32)
            if MAGNITUDE in factors:
                total *= (factors[MAGNITUDE].reshape(-1)[rows] / _norms(total))[:, None]
            out[rows] = total


def _norms(rows: Array) -> Array:
    """Return the Euclidean norms of rows, whose squares are always summed in the same order."""
    squares = np.square(rows, dtype=np.float64)
    while (width := squares.shape[1]) > 1:
        half = (width + 1) // 2
        squares[:, : width - half] += squares[:, half:]
        squares = squares[:, :half]
    norms: Array = np.sqrt(squares[:, 0]).astype(np.float32)
    return norms
