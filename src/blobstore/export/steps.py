"""Steps: a shard's pieces at their places, cut into what one thread does at once. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from blobstore.export.planned_files import MadeArray, Piece, PlannedShard, ValueRange

_COPIED_AT_ONCE = 2**26
VALUES_AT_ONCE = 2**20
"""A multiple of every group size."""
_ROWS_AT_ONCE = 128
"""Rows of a transposed weight are columns of what is stored: a multiple of every group size."""


@dataclass(frozen=True, slots=True)
class Step:
    """A piece, the place of its bytes in its file, and the array it is of."""

    piece: Piece
    at: int
    array: str


def steps_of(shard: PlannedShard) -> Iterator[Step]:
    """Yield the steps of a shard in file order, behind its header and without gaps."""
    for whole in whole_steps(shard):
        at = whole.at
        for piece in _cut(whole.piece):
            yield Step(piece, at, whole.array)
            at += piece.nbytes


def whole_steps(shard: PlannedShard) -> Iterator[Step]:
    """Yield one step for each whole piece of a shard, in file order."""
    at = len(shard.header)
    for array in shard.arrays:
        for piece in array.pieces:
            yield Step(piece, at, array.name)
            at += piece.nbytes


def _cut(piece: Piece) -> Iterator[Piece]:
    """Yield a piece in parts that one thread does at once."""
    if isinstance(piece, ValueRange):
        most = _values_at_once(piece)
        for start in range(0, piece.count, most):
            yield replace(piece, start=piece.start + start, count=min(most, piece.count - start))
    elif isinstance(piece, MadeArray):
        yield piece
    else:
        for start in range(0, piece.nbytes, _COPIED_AT_ONCE):
            yield replace(
                piece,
                offset=piece.offset + start,
                nbytes=min(_COPIED_AT_ONCE, piece.nbytes - start),
            )


def _values_at_once(piece: ValueRange) -> int:
    """Return how many values one thread computes at once.

    Of a transposed weight they are whole rows, in whole groups of them.
    """
    if not piece.transposed:
        return VALUES_AT_ONCE
    cols = piece.shape[-1]
    rows = VALUES_AT_ONCE // cols
    return (rows - rows % _ROWS_AT_ONCE or rows) * cols or VALUES_AT_ONCE
