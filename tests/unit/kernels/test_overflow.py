"""A group that spans more than its dtype can scale: all kernels name its first weight.

Only F32 and BF16 can have one: F16's largest range fits F16 when it is divided by 15 or 255.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.weights import (
    BF16,
    DTYPES,
    F16,
    F32,
    FP,
    TARGETS,
    TWIN,
    assert_same_parts,
    edge_weights,
    random_importance,
    random_weights,
)

from blobstore import kernels
from blobstore.errors import NonFiniteWeightError
from blobstore.formats.quant import Quantization, QuantType
from blobstore.kernels.arrays import QuantizedArray, dtype_of, numpy_dtype

Array = np.ndarray[Any, Any]

SIZE = 32
LAST = 40
"""Of 41 groups: a tile of 32, blocks of some lanes, and one group alone."""

any_method = pytest.mark.parametrize("method", kernels.METHODS)
any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
any_wide_dtype = pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
any_affine = pytest.mark.parametrize("quant_type", ["int4", "int8"])
any_kernel = pytest.mark.parametrize(
    "kernel", [*TARGETS.values(), TWIN], ids=lambda kernel: kernel.name
)


def empty_parts(weights: Array, quant_type: str, group_size: int = SIZE) -> QuantizedArray[Array]:
    """Return flat arrays to fill, each byte 0x77."""
    quantization = Quantization(QuantType(quant_type), group_size)
    weight, scale, *rest = (
        np.full(part.nbytes, 0x77, np.uint8).view(numpy_dtype(part.dtype))
        for part in quantization.parts(weights.shape, dtype_of(weights))
    )
    return QuantizedArray(weight, scale, rest[0] if rest else None, None, quantization)


def with_overflow(dtype: np.dtype[Any], *groups: int) -> Array:
    """Return flat weights, in these groups of which the range is beyond the largest float."""
    weights = random_weights(dtype, LAST + 1, SIZE)
    for group in groups:
        weights[group, [7, 11]] = 3e38, -2e38
    return weights.reshape(-1)


@any_kernel
@any_method
@any_wide_dtype
@any_affine
def test_the_first_weight_of_the_first_group_that_overflows_is_returned_and_all_is_stored(
    quant_type: str, dtype: np.dtype[Any], method: str, kernel: kernels.Kernel
) -> None:
    for groups in ((0,), (1,), (17, 23), (31, 33), (LAST - 1,), (LAST,), (0, LAST)):
        weights = with_overflow(dtype, *groups)
        parts = empty_parts(weights, quant_type)
        choice = kernels.ScaleChoice(method)
        assert kernels.quantize_into(weights, parts, choice, kernel=kernel) == groups[0] * SIZE
        stored = kernels.quantize(weights[None], quant_type, group_size=SIZE, method=method)
        assert np.flatnonzero(~np.isfinite(stored.scale)).tolist() == list(groups)
        assert stored.bias is not None
        for part, expected in zip(
            (parts.weight, parts.scale, parts.bias),
            (stored.weight, stored.scale, stored.bias),
            strict=True,
        ):
            assert np.asarray(part).tobytes() == expected.tobytes()


@any_kernel
@any_method
@any_wide_dtype
@any_affine
def test_a_non_finite_weight_is_returned_before_and_behind_a_group_that_overflows(
    quant_type: str, dtype: np.dtype[Any], method: str, kernel: kernels.Kernel
) -> None:
    choice = kernels.ScaleChoice(method)
    for group, bad in product((0, 20, LAST), repeat=2):
        weights = with_overflow(dtype, group)
        weights[bad * SIZE + 5] = np.nan
        parts = empty_parts(weights, quant_type)
        assert kernels.quantize_into(weights, parts, choice, kernel=kernel) == bad * SIZE + 5


@pytest.mark.parametrize("jobs", [1, 2, 3, 7])
@any_method
@any_wide_dtype
def test_quantize_stores_infinite_scales_and_names_only_non_finite_weights(
    dtype: np.dtype[Any], method: str, jobs: int
) -> None:
    options: dict[str, Any] = {"group_size": SIZE, "method": method}
    weights = with_overflow(dtype, 0, 20, LAST).reshape(-1, SIZE)
    quantized = kernels.quantize(weights, "int4", jobs=jobs, **options)
    assert np.flatnonzero(~np.isfinite(quantized.scale)).tolist() == [0, 20, LAST]
    assert_same_parts(quantized, kernels.quantize(weights, "int4", kernel=TWIN, **options))
    for bad in (LAST, 30, 10):
        weights[bad, 3] = np.inf
        with pytest.raises(NonFiniteWeightError) as caught:
            kernels.quantize(weights, "int4", jobs=jobs, **options)
        assert caught.value.index == (bad, 3)


def ends_of(dtype: np.dtype[Any]) -> Array:
    """Return ``[rows, 128]`` weights whose ranges are about the largest float, or twice that."""
    largest = float(ml_dtypes.finfo(dtype).max)
    half = largest / 2
    below, half_below = (
        float(np.nextafter(dtype.type(top), dtype.type(0))) for top in (largest, half)
    )
    pairs = [(half_below, -half), (half, -half), (half, -below), (below, -half_below)]
    pairs += [(largest, -below), (-largest, largest), (largest, below), (-largest, -below)]
    return np.array(pairs).repeat(64, axis=0).reshape(-1, 128).astype(dtype)


@any_dtype
@any_method
@pytest.mark.parametrize(("quant_type", "group_size"), [("int4", 32), ("int8", 64), *FP])
def test_kernels_agree_at_the_edges_of_the_format_where_only_affine_scales_overflow(
    quant_type: str, group_size: int, method: str, dtype: np.dtype[Any]
) -> None:
    """A bias never overflows: it is a weight or zero, or a search had a finite error with it."""
    rows = np.concatenate([edge_weights(dtype), ends_of(dtype)])
    importance = kernels.checked_importance(random_importance(128), 128)
    choices = [kernels.ScaleChoice(method)]
    if method == "search":
        choices += [kernels.ScaleChoice(method, each) for each in (importance, importance * 0)]
    for choice, kernel in product(choices, (*TARGETS.values(), TWIN)):
        parts = empty_parts(rows.reshape(-1), quant_type, group_size)
        found = kernels.quantize_into(rows.reshape(-1), parts, choice, kernel=kernel)
        assert parts.bias is None or np.isfinite(parts.bias).all()
        finite = np.isfinite(parts.scale)
        assert found == (-1 if finite.all() else int(np.argmin(finite)) * group_size)
        assert finite.all() == (parts.bias is None or dtype == F16)
        others = rows[finite.reshape(len(rows), -1).all(axis=1)].reshape(-1)
        rest = empty_parts(others, quant_type, group_size)
        assert kernels.quantize_into(others, rest, choice, kernel=kernel) == -1


@any_kernel
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_a_group_counts_as_many_weights_as_it_has(group_size: int, kernel: kernels.Kernel) -> None:
    weights = np.zeros(3 * group_size, F32)
    weights[2 * group_size :: 2] = 3e38
    weights[2 * group_size + 1 :: 2] = -3e38
    parts = empty_parts(weights, "int8", group_size)
    assert kernels.quantize_into(weights, parts, kernel=kernel) == 2 * group_size


def test_nothing_overflows_where_there_are_no_weights() -> None:
    for kernel in (*TARGETS.values(), TWIN):
        weights = np.zeros(0, F32)
        assert kernels.quantize_into(weights, empty_parts(weights, "int4"), kernel=kernel) == -1
