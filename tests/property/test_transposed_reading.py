"""Transposed values of any range equal NumPy's, in the memory of the values."""

from __future__ import annotations

import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.checkpoints import BF16, normal, safetensors_bytes
from support.sparse import write_sparse

from blobstore.source.inventory import read_inventory
from blobstore.source.weights import SourceReaders

SIDES = st.integers(1, 9)


@settings(max_examples=40)
@given(
    st.data(),
    st.lists(SIDES, min_size=2, max_size=4),
    st.sampled_from([BF16, np.dtype(np.float32)]),
)
def test_values_of_any_range(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    shape: list[int],
    dtype: np.dtype[np.generic],
) -> None:
    path = tmp_path_factory.mktemp("t") / "m.safetensors"
    array = normal("w", *shape, dtype=dtype)
    turned = np.ascontiguousarray(array.swapaxes(-1, -2))
    path.write_bytes(safetensors_bytes({"x.weight": array}))
    weight = read_inventory(path).weights[0].as_transposed()
    assert weight.shape == turned.shape
    start = data.draw(st.integers(0, array.size - 1))
    count = data.draw(st.integers(0, array.size - start))
    with closing(SourceReaders()) as readers:
        values = readers.values(weight, start, count)
    assert values.tobytes() == turned.reshape(-1)[start : start + count].tobytes()
    assert array[weight.stored_index(start)] == turned.reshape(-1)[start]


def test_memory_is_that_of_the_values(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "m.safetensors", {"x.weight": ("BF16", (512, 4096))})
    weight = read_inventory(path).weights[0].as_transposed()
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
