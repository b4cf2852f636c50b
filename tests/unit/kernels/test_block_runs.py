"""Which scales a run of block FP8 codes needs, and how it is cut: against every code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from blobstore.errors import UsageError
from blobstore.kernels.scales import BlockRun

sizes = st.one_of(
    st.integers(1, 4), st.integers(1, 400), st.sampled_from([127, 128, 129, 256, 257, 5000])
)


@st.composite
def runs(draw: st.DrawFn) -> BlockRun:
    """Return a run of up to 3,000 codes through matrices of any shape."""
    return BlockRun(
        rows=draw(sizes),
        cols=draw(sizes),
        first=draw(st.integers(0, 10**6)),
        count=draw(st.integers(0, 3000)),
    )


def scales_of_codes(run: BlockRun) -> Any:
    """Return the flat index of each code's scale."""
    index = np.arange(run.first, run.first + run.count)
    matrix, row, column = (
        index // run.cols // run.rows,
        index // run.cols % run.rows,
        index % run.cols,
    )
    rows, columns = -(-run.rows // 128), -(-run.cols // 128)
    return (matrix * rows + row // 128) * columns + column // 128


@settings(max_examples=100)
@given(runs())
def test_the_scales_of_a_run_hold_those_of_its_codes_and_no_row_of_scales_without_one(
    run: BlockRun,
) -> None:
    of_codes = scales_of_codes(run)
    if not run.count:
        assert len(run.scales) == 0
        return
    assert (run.scales.start, run.scales.stop) <= (of_codes.min(), of_codes.max() + run.blocks[1])
    assert run.scales.start <= of_codes.min() <= of_codes.max() < run.scales.stop
    if run.first // run.cols == (run.first + run.count - 1) // run.cols:
        assert list(run.scales) == sorted(set(of_codes.tolist()))


@settings(max_examples=100)
@given(runs(), st.sampled_from([1, 2, 16, 300, 10**6]))
def test_pieces_are_the_run_in_order_and_need_few_scales_whatever_the_shape(
    run: BlockRun, most: int
) -> None:
    end = run.first
    for piece in run.pieces(most):
        assert (piece.rows, piece.cols, piece.first) == (run.rows, run.cols, end)
        assert piece.count > 0
        assert len(piece.scales) <= most + piece.count // 16 + 4
        end += piece.count
    assert end == run.first + run.count


@pytest.mark.parametrize(
    ("rows", "cols", "pieces"),
    [
        (1, 1, 8),
        (1, 2, 4),
        (2, 1, 4),
        (4, 128, 1),
        (128, 128, 1),
        (7168, 2048, 1),
        (2**21, 1, 1),
        (1, 2**40, 1),
    ],
)
def test_a_run_of_an_import_takes_few_pieces(rows: int, cols: int, pieces: int) -> None:
    run = BlockRun(rows=rows, cols=cols, first=0, count=2**21)
    assert len(list(run.pieces(2**18))) == pieces


def test_the_rows_of_a_piece_are_whole_where_their_scales_are_far_more_than_it_needs() -> None:
    run = BlockRun(rows=128, cols=2**40, first=2**40 - 1000, count=2000)
    assert len(run.scales) == 2**33
    assert [(piece.first, piece.count, len(piece.scales)) for piece in run.pieces(2**18)] == [
        (2**40 - 1000, 1000, 8),
        (2**40, 1000, 8),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first": -1}, "first is -1"),
        ({"first": True}, "first is True"),
        ({"first": 1.0}, r"first is 1\.0"),
        ({"first": np.int64(1)}, "first is"),
        ({"first": 2**63 - 300}, "the run ends at"),
        ({"first": 2**63}, "first is 9223372036854775808"),
        ({"rows": -2}, "rows is -2"),
        ({"rows": 0}, r"300 codes, but its matrices \[0, 200\]"),
        ({"cols": None}, "cols is None"),
        ({"cols": 0}, r"300 codes, but its matrices \[3, 0\]"),
        ({"cols": 2**64}, "cols is"),
        ({"count": "300"}, "count is '300'"),
    ],
)
def test_a_run_that_can_not_be_is_refused(changes: dict[str, Any], message: str) -> None:
    fits: dict[str, Any] = {"rows": 3, "cols": 200, "first": 0, "count": 300}
    BlockRun(**fits)
    with pytest.raises(UsageError, match=message):
        BlockRun(**{**fits, **changes})
