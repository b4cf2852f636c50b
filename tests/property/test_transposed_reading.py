"""Tiles cover a range of matrices once and in order; transposed values equal NumPy's."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.checkpoints import BF16, normal, safetensors_bytes
from support.sparse import write_sparse

from blobstore.source.inventory import read_inventory
from blobstore.source.weights import SourceReaders, SourceWeight, tiles_of

SIDES = st.integers(1, 9)


@given(st.integers(0, 200), st.integers(0, 200), SIDES, SIDES)
def test_tiles_are_a_range_of_matrices(start: int, count: int, rows: int, cols: int) -> None:
    places: list[int] = []
    for tile in tiles_of(start, count, rows, cols):
        assert tile.at == len(places)
        assert tile.shape[0] == 1 or (tile.col, tile.stop_col) == (0, cols)
        places += [
            (tile.matrix * rows + row) * cols + col
            for row in range(tile.row, tile.stop_row)
            for col in range(tile.col, tile.stop_col)
        ]
        assert len(places) == tile.at + tile.size
        assert tile.stop_row <= rows
    assert places == list(range(start, start + count))


def weight_of(path: Path) -> SourceWeight:
    (weight,) = read_inventory(path).weights
    return weight.as_transposed()


@settings(max_examples=40)
@given(
    st.data(),
    st.lists(st.integers(1, 3), max_size=2),
    SIDES,
    SIDES,
    st.sampled_from([BF16, np.dtype(np.float32)]),
)
def test_values_of_any_range(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    lead: list[int],
    rows: int,
    cols: int,
    dtype: np.dtype[np.generic],
) -> None:
    path = tmp_path_factory.mktemp("t") / "m.safetensors"
    array = normal("w", *lead, rows, cols, dtype=dtype)
    path.write_bytes(safetensors_bytes({"odd": np.zeros(1, np.uint8), "x.weight": array}))
    weight = next(
        one for one in read_inventory(path).weights if one.name == "x.weight"
    ).as_transposed()
    assert weight.shape == array.swapaxes(-1, -2).shape
    start = data.draw(st.integers(0, array.size))
    count = data.draw(st.integers(0, array.size - start))
    readers = SourceReaders()
    try:
        values = readers.values(weight, start, count)
        wanted = np.ascontiguousarray(array.swapaxes(-1, -2)).reshape(-1)[start : start + count]
        assert values.tobytes() == wanted.tobytes()
    finally:
        readers.close()
    if array.size:
        place = data.draw(st.integers(0, array.size - 1))
        assert array[weight.stored_index(place)] == array.swapaxes(-1, -2).reshape(-1)[place]


def test_memory_is_that_of_the_values(tmp_path: Path) -> None:
    weight = weight_of(
        write_sparse(tmp_path / "m.safetensors", {"x.weight": ("BF16", (512, 4096))})
    )
    count = weight.values_at_once(2**18)
    assert count % 512 == 0
    readers = SourceReaders()
    tracemalloc.start()
    try:
        for start in range(0, weight.elements, count):
            readers.values(weight, start, min(count, weight.elements - start))
        assert tracemalloc.get_traced_memory()[1] < 3 * 2 * count
    finally:
        tracemalloc.stop()
        readers.close()
