"""Planes: items come back, exponents lie side by side."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.checkpoints import BF16, normal

from blobstore.store.packed.files import join_planes, split_planes


@given(data=st.binary(max_size=300), width=st.sampled_from([1, 2, 4]))
def test_bytes_come_back(data: bytes, width: int) -> None:
    assert join_planes(b"".join(split_planes(data, width)), width) == data


@pytest.mark.parametrize(("dtype", "width"), [(BF16, 2), (np.float32, 4)])
def test_the_last_plane_has_the_exponents(dtype: object, width: int) -> None:
    values = normal("w", 1000, dtype=dtype)
    *_, exponents, rest = split_planes(values.tobytes(), width)
    assert len(exponents) == 1000
    assert len(set(exponents)) < 40
    assert rest == b""
