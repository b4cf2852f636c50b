"""Transposed values of any range equal NumPy's."""

from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.checkpoints import BF16, normal, safetensors_bytes

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
