"""A search is never worse than minmax in any group, and is much better on average.

Errors are those of the dequantized values, in float64; "never worse" is meant without tolerance.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.weights import (
    BF16,
    DTYPES,
    EVERY,
    F16,
    F32,
    FP,
    assert_same_parts,
    edge_weights,
    every_16_bit_value,
    random_importance,
    random_weights,
    raw,
    shaped_groups,
    squared_errors,
)

from blobstore import kernels
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]

GROUPS = 40_000  # for each of 27 types and float formats: 1,080,000 in all

any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
any_form = pytest.mark.parametrize(("quant_type", "group_size"), EVERY)


def both(
    weights: Array, quant_type: str, group_size: int, **options: Any
) -> tuple[QuantizedArray[Array], ...]:
    """Return what a search and what minmax gives."""
    searched = kernels.quantize(
        weights, quant_type, group_size=group_size, method="search", **options
    )
    return searched, kernels.quantize(weights, quant_type, group_size=group_size)


def assert_never_worse(
    weights: Array, quant_type: str, group_size: int, importance: Array | None = None
) -> Array:
    """Fail if any group's error is larger than minmax's; return which groups' errors are smaller.

    Where float32 overflows, minmax reads back as infinities or NaN, which nothing is worse than.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        searched, minmax = (
            squared_errors(weights, quantized, importance)
            for quantized in both(weights, quant_type, group_size, importance=importance)
        )
    bounded = np.isfinite(minmax)
    worse = bounded & ~(searched <= minmax)
    assert not worse.any(), (
        f"groups {np.flatnonzero(worse)[:5]}: {searched[worse][:5]} > {minmax[worse][:5]}"
    )
    return searched < minmax


@any_dtype
@any_form
def test_search_is_never_worse_than_minmax(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    better = assert_never_worse(shaped_groups(dtype, GROUPS, group_size), quant_type, group_size)
    assert better.any() or quant_type == "mxfp8"


@any_dtype
@any_form
def test_search_is_never_worse_on_groups_far_from_zero(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    noise = shaped_groups(F32, 8000, group_size, seed=(1,))
    offsets = np.resize(np.array([1, -1, 30, 1000], np.float32), (8000, 1))
    for unit in (1, 1e-3, 1e-6):
        weights = np.clip(offsets + noise * np.float32(unit), -65504, 65504).astype(dtype)
        assert_never_worse(weights, quant_type, group_size)


@any_dtype
@any_form
def test_search_is_never_worse_at_any_magnitude(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    noise = np.random.default_rng(group_size).standard_normal((20, 128))
    limit = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(over="ignore"):
        powers = 2.0 ** np.arange(-150, 129)[:, None, None]
        weights = np.clip((noise * powers).reshape(-1, 128), -limit, limit).astype(dtype)
    assert_never_worse(weights, quant_type, group_size)
    assert_never_worse(weights, quant_type, group_size, random_importance(128))


@any_dtype
@any_form
def test_search_is_never_worse_on_edge_groups_and_no_scale_is_nan(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    weights = edge_weights(dtype)
    for importance in (None, random_importance(128)):
        assert_never_worse(weights, quant_type, group_size, importance)
        searched, _ = both(weights, quant_type, group_size, importance=importance)
        assert_no_nan(searched)


def assert_no_nan(quantized: QuantizedArray[Array]) -> None:
    if quantized.bias is not None:
        assert not np.isnan(quantized.scale.astype(np.float32)).any()
        assert not np.isnan(quantized.bias.astype(np.float32)).any()
    else:
        nan = {0x7F, 0xFF} if quantized.quant_type.value == "nvfp4" else {0xFF}
        assert not nan & set(np.unique(quantized.scale).tolist())


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@any_form
def test_search_is_never_worse_for_constants_and_spikes_of_every_16_bit_value(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    every = every_16_bit_value(dtype)
    with np.errstate(invalid="ignore"):
        finite = every[np.isfinite(every)][:, None]
    constants = np.repeat(finite[::5], group_size, axis=1)
    spikes, two_values = np.zeros_like(constants), constants.copy()
    spikes[:, group_size // 2] = finite[::5, 0]
    two_values[:, ::2] = finite[
        np.random.default_rng(5).integers(len(finite), size=(len(constants), 1)), 0
    ]
    for weights in (constants, spikes, two_values):
        assert_never_worse(weights, quant_type, group_size)
        assert_no_nan(kernels.quantize(weights, quant_type, group_size=group_size, method="search"))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5, 448.0, 2.0**-9], ids=str)
@any_dtype
@any_form
def test_a_group_that_minmax_stores_exactly_is_stored_as_minmax_stores_it(
    quant_type: str, group_size: int, dtype: np.dtype[Any], value: float
) -> None:
    weights = np.full((20, group_size), value, dtype)
    searched, minmax = both(weights, quant_type, group_size)
    exact = squared_errors(weights, minmax) == 0
    np.testing.assert_array_equal(
        raw(searched.scale).ravel()[exact], raw(minmax.scale).ravel()[exact]
    )
    assert (squared_errors(weights, searched)[exact] == 0).all()
    assert exact.all() or value not in {0.0, -0.0}


@any_dtype
@any_form
def test_with_importance_the_weighted_error_is_never_worse(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    groups = 1600 * 5
    weights = shaped_groups(dtype, groups, group_size, seed=(2,)).reshape(-1, 5 * group_size)
    searched = kernels.quantize(weights, quant_type, group_size=group_size, method="search")
    for seed in range(3):
        importance = random_importance(5 * group_size, seed)
        assert_never_worse(weights, quant_type, group_size, importance)
        weighted = kernels.quantize(
            weights, quant_type, group_size=group_size, method="search", importance=importance
        )
        sums = [
            squared_errors(weights, quantized, importance).sum()
            for quantized in (weighted, searched)
        ]
        assert sums[0] < sums[1] or quant_type == "mxfp8"


@pytest.mark.parametrize("factor", [1, 2, 0.5, 2.0**40, 2.0**-90], ids=str)
@any_dtype
@any_form
def test_importance_times_a_power_of_two_gives_the_same_bits(
    quant_type: str, group_size: int, dtype: np.dtype[Any], factor: float
) -> None:
    weights = random_weights(dtype, 30, 640)
    options: dict[str, Any] = {"group_size": group_size, "method": "search"}
    for importance, same in (
        (np.ones(640), None),
        (random_importance(640), random_importance(640)),
    ):
        scaled = kernels.quantize(weights, quant_type, importance=importance * factor, **options)
        assert_same_parts(scaled, kernels.quantize(weights, quant_type, importance=same, **options))


@pytest.mark.parametrize("constant", [1.3, 0.37, 7e30, 1e-20], ids=str)
@any_form
def test_any_constant_importance_gives_the_bits_of_none(
    quant_type: str, group_size: int, constant: float
) -> None:
    weights = shaped_groups(BF16, 4000, group_size)
    importance = np.full(group_size, constant)
    options: dict[str, Any] = {"group_size": group_size, "method": "search"}
    weighted = kernels.quantize(weights, quant_type, importance=importance, **options)
    assert_same_parts(weighted, kernels.quantize(weights, quant_type, **options))


@any_dtype
@pytest.mark.parametrize(("quant_type", "group_size"), FP)
def test_weights_of_importance_0_do_not_keep_the_others_from_their_best_scale(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    weights = np.random.default_rng(9).standard_normal((300, group_size)).astype(dtype)
    importance = np.where(np.arange(group_size) % 2, 1.0, 0.0)
    spiked = weights.copy()
    spiked[:, 0] = 3e4
    options: dict[str, Any] = {
        "group_size": group_size,
        "method": "search",
        "importance": importance,
    }
    alone, beside = (
        squared_errors(values, kernels.quantize(values, quant_type, **options), importance)
        for values in (weights, spiked)
    )
    np.testing.assert_allclose(beside, alone, rtol=2e-4, atol=0)


@pytest.mark.parametrize(
    ("quant_type", "group_size", "dtype", "bound"),
    [
        *(("int4", 32, dtype, 0.87) for dtype in DTYPES),
        *(("int4", 64, dtype, 0.90) for dtype in DTYPES),
        *(("int4", 128, dtype, 0.92) for dtype in DTYPES),
        (
            "int8",
            64,
            BF16,
            0.75,
        ),  # of which most is minmax's rounding of scale and bias after it chose the codes
        *(("int8", 64, dtype, 0.89) for dtype in (F16, F32)),
        *(("nvfp4", 16, dtype, 0.87) for dtype in DTYPES),
        *(("mxfp4", 32, dtype, 0.96) for dtype in DTYPES),
        *(("mxfp8", 32, dtype, 1.0) for dtype in DTYPES),
    ],
)
def test_the_error_of_a_search_on_normal_weights_is_at_most_this_part_of_minmax_s(
    quant_type: str, group_size: int, dtype: np.dtype[Any], bound: float
) -> None:
    weights = (np.random.default_rng(7).standard_normal((512, 2560)) * 0.7).astype(dtype)
    searched, minmax = (
        squared_errors(weights, quantized).sum()
        for quantized in both(weights, quant_type, group_size)
    )
    assert np.sqrt(searched / minmax) <= bound


@pytest.mark.parametrize(("quant_type", "group_size"), [("int4", 32), ("int8", 64), *FP])
def test_a_huge_weight_of_importance_0_does_not_stop_the_search(
    quant_type: str, group_size: int
) -> None:
    weights = np.random.default_rng(4).standard_normal((64, group_size)).astype(np.float32)
    weights[:, 3] = 1e22  # its squared error is infinite
    importance = np.where(np.arange(group_size) == 3, 0.0, 1.0)
    quantized = kernels.quantize(
        weights, quant_type, group_size=group_size, method="search", importance=importance
    )
    error = (kernels.dequantize(quantized).astype(np.float64) - weights) * importance
    assert np.sqrt(np.mean(error**2)) < 0.2
