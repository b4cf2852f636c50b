"""BlockRun: a run of the codes of block FP8 matrices, and the scales that it needs. A value; nothing is read here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from blobstore.errors import UsageError
from blobstore.kernels.small_floats import FP8_BLOCK

_END = 2**63
"""Flat indices are int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """``count`` codes from flat index ``first`` on, of matrices ``[rows, cols]`` that follow each other, row-major.

    It may begin and end inside a row. Each matrix has its own scales, row-major too: ``blocks`` of them, those at its edges
    for fewer than 128 rows or columns.

    Raises: UsageError unless all four are whole numbers from 0 on, matrices of a run with codes are not empty, and the run
    ends before 2^63.
    """

    rows: int
    cols: int
    first: int
    count: int

    def __post_init__(self) -> None:
        numbers = {"rows": self.rows, "cols": self.cols, "first": self.first, "count": self.count}
        for name, number in numbers.items():
            if type(number) is not int or not 0 <= number < _END:
                raise UsageError(f"{name} is {number!r}: it must be a whole number from 0 to 2^63 - 1")
        if self.first + self.count >= _END:
            raise UsageError(f"the run ends at {self.first + self.count:,}: it must end before 2^63")
        if self.count and not self.rows * self.cols:
            raise UsageError(f"{self.count:,} codes can't be of matrices [{self.rows:,}, {self.cols:,}], which are empty")

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns of a matrix's scales."""
        return -(-self.rows // FP8_BLOCK), -(-self.cols // FP8_BLOCK)

    @property
    def scales(self) -> range:
        """Which scales it needs, as flat indices into those of all matrices.

        A run within one row of a matrix needs those of its blocks; any other whole rows of scales.
        """
        if not self.count:
            return range(0)
        last = self.first + self.count - 1
        begin, end = self._row_of_scales(self.first), self._row_of_scales(last)
        if self.first // self.cols == last // self.cols:
            return range(begin + self.first % self.cols // FP8_BLOCK, end + last % self.cols // FP8_BLOCK + 1)
        return range(begin, end + self.blocks[1])

    def _row_of_scales(self, index: int) -> int:
        """Return the first scale of the row of blocks that a code is in."""
        matrix, row = divmod(index // self.cols, self.rows)
        return (matrix * self.blocks[0] + row // FP8_BLOCK) * self.blocks[1]

    def pieces(self, scales: int) -> Iterator[BlockRun]:
        """Yield the run cut so that no piece needs many more than that many ``scales``, whatever the matrices' shape.

        At most one more for each 16 of its codes, and 4. What needs fewer stays whole, unless its rows are longer than it:
        then it is cut where a row ends, since a whole row of scales may be far more than the pieces need.
        """
        block_rows, block_columns = self.blocks
        most = max(1, scales * self.rows * self.cols // max(1, block_rows * block_columns))
        first, end = self.first, self.first + self.count
        while first < end:
            count = min(most, end - first)
            if count < self.cols:
                count = min(count, self.cols - first % self.cols)
            yield replace(self, first=first, count=count)
            first += count
