"""Planes: items come back, every kernel makes the same bytes, exponents lie side by side."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.checkpoints import normal

from blobstore.errors import UsageError
from blobstore.kernels import KERNELS, join_planes, split_planes

SIZES = (0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 129, 1000, 4099)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("has_base", [False, True])
def test_every_kernel_gives_the_bytes_of_the_twin(name: str, width: int, has_base: bool) -> None:
    random = np.random.default_rng(width)
    for count in SIZES:
        items = random.bytes(count * width)
        base = random.bytes(count * width) if has_base else None
        planes = bytes(split_planes(items, width, base, kernel=KERNELS[name]))
        assert planes == bytes(split_planes(items, width, base, kernel=KERNELS["reference"]))
        out = bytearray(count * width)
        join_planes(planes, width, out, base, kernel=KERNELS[name])
        assert bytes(out) == items


@given(st.binary(max_size=64), st.sampled_from([1, 2, 4]))
def test_any_bytes_come_back(data: bytes, width: int) -> None:
    items = data[: len(data) // width * width]
    out = bytearray(len(items))
    join_planes(split_planes(items, width, items), width, out, items)
    assert bytes(out) == items


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_the_first_plane_is_the_exponent(dtype: str, width: int) -> None:
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    values = np.array([1.0, -1.0, 0.5, -3.0, 0.0], np.float32).astype(kind)
    planes = split_planes(values.tobytes(), width)
    assert list(planes[:5]) == [127, 127, 126, 128, 0]


def test_an_item_beside_its_equal_is_zero() -> None:
    data = normal("a", 100).tobytes()
    assert not any(split_planes(data, 2, data))


def test_sizes_that_do_not_fit_are_refused() -> None:
    for items, width, base in [
        (b"123", 2, None),
        (b"12345678", 3, None),
        (b"1234", 2, b"12"),
        (b"12", 0, None),
    ]:
        with pytest.raises(UsageError):
            split_planes(items, width, base)
    with pytest.raises(UsageError):
        join_planes(b"1234", 2, bytearray(2))
