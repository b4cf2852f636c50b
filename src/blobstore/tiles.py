"""Tiles: a range of consecutive values of matrices, cut where rows begin and end. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of one matrix, each from the first to before the last; ``at``: its place in the range it is of."""

    matrix: int
    row: int
    stop_row: int
    col: int
    stop_col: int
    at: int

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns."""
        return self.stop_row - self.row, self.stop_col - self.col

    @property
    def size(self) -> int:
        """Number of values."""
        rows, cols = self.shape
        return rows * cols


def tiles_of(start: int, count: int, rows: int, cols: int) -> Iterator[Tile]:
    """Yield ``count`` values from flat index ``start`` on, of matrices ``[rows, cols]`` that follow each other.

    In their order, each tile whole rows of a matrix, or a part of one row.
    """
    done = 0
    while done < count:
        matrix, first = divmod(start + done, rows * cols)
        row, col = divmod(first, cols)
        whole = min(rows - row, (count - done) // cols) if col == 0 else 0
        stop_col = cols if whole else min(cols, col + count - done)
        tile = Tile(matrix, row, row + max(1, whole), col, stop_col, done)
        yield tile
        done += tile.size
