"""A global scale of nvfp4 keeps small weights out of E4M3's subnormal scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.weights import (
    BF16,
    DTYPES,
    F32,
    assert_same_parts,
    edge_weights,
    random_importance,
    random_weights,
    raw,
    shaped_groups,
    squared_errors,
)

from blobstore import kernels
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]

SMALLEST_NORMAL_SCALE = 0x08
LARGEST_SCALE = 0x7E

any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
any_method = pytest.mark.parametrize("method", kernels.METHODS)


def both(
    weights: Array, method: str, **options: Any
) -> tuple[QuantizedArray[Array], QuantizedArray[Array]]:
    """Return the weights quantized with and without a global scale."""
    return (
        kernels.quantize(weights, "nvfp4", method=method, global_scale=True, **options),
        kernels.quantize(weights, "nvfp4", method=method, **options),
    )


def factor_of(quantized: QuantizedArray[Array]) -> float:
    assert quantized.global_scale is not None
    assert (quantized.global_scale.shape, quantized.global_scale.dtype) == ((1,), np.float32)
    return float(quantized.global_scale[0])


@any_method
@any_dtype
def test_it_is_the_smallest_power_of_two_with_which_all_scales_fit(
    dtype: np.dtype[Any], method: str
) -> None:
    for exponent in (-20, -3, 0, 4):
        for largest in (1.0, 1.3125, 1.984375):
            weights = (
                np.random.default_rng(1).uniform(-1, 1, (64, 128)) * 2.0**exponent * 0.5
            ).astype(dtype)
            weights[3, 5] = -largest * 2.0**exponent
            amax = float(np.abs(weights.astype(np.float64)).max())
            factor = factor_of(kernels.quantize(weights, "nvfp4", method=method, global_scale=True))
            assert np.frexp(factor)[0] == 0.5
            assert amax / factor <= 3.5 * 448 < 2 * amax / factor


@pytest.mark.parametrize(
    ("amax", "expected"),
    [
        (0.0, 1.0),
        (1568.0, 1.0),
        (np.nextafter(1568.0, 3000), 2.0),
        (784.0, 0.5),
        (3136.0, 2.0),
        (2.0**-149, 2.0**-126),
        (1568 * 2.0**-126, 2.0**-126),
        (float(np.finfo(np.float32).max), 2.0**118),
        (float("inf"), 1.0),
    ],
)
def test_the_global_scale_of_a_largest_magnitude_computed_by_hand(
    amax: float, expected: float
) -> None:
    assert kernels.global_scale_of(amax) == expected


@any_dtype
def test_the_largest_magnitude_is_that_of_all_weights_or_infinity(dtype: np.dtype[Any]) -> None:
    weights = random_weights(dtype, 8, 64)
    assert kernels.largest_magnitude(weights) == float(np.abs(weights.astype(np.float32)).max())
    assert kernels.largest_magnitude(np.full((1, 16), -0.0, dtype)) == 0
    assert kernels.largest_magnitude(np.zeros((0, 16), dtype)) == 0
    for bad in (np.nan, np.inf, -np.inf, -np.nan):
        weights[2, 3] = bad
        assert kernels.largest_magnitude(weights) == np.inf


@any_method
@any_dtype
def test_values_are_the_same_where_all_scales_are_normal_without_it(
    dtype: np.dtype[Any], method: str
) -> None:
    # Between 0.5 and 2: amax / 6 is above 2^-6, and so are all scales that a search can prefer.
    generator = np.random.default_rng(3)
    weights = (
        generator.uniform(0.5, 2, (200, 320)) * generator.choice([-1, 1], (200, 320))
    ).astype(dtype)
    for options in ({}, {"importance": random_importance(320)}) if method == "search" else ({},):
        scaled, plain = both(weights, method, **options)
        assert plain.scale.min() > SMALLEST_NORMAL_SCALE
        assert scaled.scale.max() <= LARGEST_SCALE
        assert factor_of(scaled) == 2.0**-9
        values, expected = (kernels.dequantize(quantized) for quantized in (scaled, plain))
        np.testing.assert_array_equal(raw(values), raw(expected))


@any_method
@any_dtype
def test_a_global_scale_of_1_gives_the_parts_of_none(dtype: np.dtype[Any], method: str) -> None:
    weights = shaped_groups(dtype, 200, 16)
    weights = np.clip(weights.astype(np.float32), -1500, 1500).astype(dtype)
    weights[0, 0] = 1500
    scaled, plain = both(weights, method)
    assert factor_of(scaled) == 1
    assert_same_parts(
        QuantizedArray(scaled.weight, scaled.scale, None, None, scaled.quantization), plain
    )


@pytest.mark.parametrize(("std", "bound"), [(0.005, 0.8), (0.001, 0.4), (1e-5, 0.15)])
@any_method
@any_dtype
def test_the_error_of_small_weights_is_clearly_smaller_with_it(
    dtype: np.dtype[Any], method: str, std: float, bound: float
) -> None:
    weights = (np.random.default_rng(5).standard_normal((256, 1024)) * std).astype(dtype)
    scaled, plain = (
        squared_errors(weights, quantized).sum() for quantized in both(weights, method)
    )
    assert np.sqrt(scaled / plain) < bound


@any_dtype
def test_a_search_with_it_is_never_worse_than_minmax_with_it(dtype: np.dtype[Any]) -> None:
    for weights in (
        shaped_groups(dtype, 20_000, 16),
        edge_weights(dtype),
        random_weights(dtype, 300, 320),
    ):
        cols = weights.shape[1]
        for importance in (None, random_importance(cols)):
            searched = kernels.quantize(
                weights, "nvfp4", method="search", importance=importance, global_scale=True
            )
            minmax = kernels.quantize(weights, "nvfp4", global_scale=True)
            with np.errstate(
                invalid="ignore", over="ignore"
            ):  # the largest floats round up to an infinity
                errors = [
                    squared_errors(weights, quantized, importance)
                    for quantized in (searched, minmax)
                ]
            bounded = np.isfinite(errors[1])
            assert (errors[0] <= errors[1])[bounded].all()
            assert bounded.mean() > 0.9


@any_method
def test_a_tensor_of_zeros_has_a_global_scale_of_1_and_stays_zero(method: str) -> None:
    weights = np.zeros((4, 64), BF16)
    weights[1] = -0.0
    quantized, _ = both(weights, method)
    assert factor_of(quantized) == 1
    np.testing.assert_array_equal(kernels.dequantize(quantized), np.zeros((4, 64), np.float32))


@any_method
@pytest.mark.parametrize("exponent", [-140, -126, -100, 100, 116], ids=str)
def test_weights_at_the_ends_of_float32_come_back_near_themselves(
    exponent: int, method: str
) -> None:
    whole = np.random.default_rng(11).integers(-2048, 2049, (32, 64))
    weights = np.ldexp(whole.astype(np.float64), exponent).astype(F32)
    quantized, _ = both(weights, method)
    values = kernels.dequantize(quantized).astype(np.float64)
    assert np.isfinite(values).all()
    relative = np.sqrt(((values - weights) ** 2).sum() / (weights.astype(np.float64) ** 2).sum())
    assert relative < 0.2


@any_method
def test_jobs_and_cuts_of_rows_of_one_tensor_share_its_global_scale(method: str) -> None:
    weights = (random_weights(BF16, 40, 320).astype(np.float32) * np.float32(1e-3)).astype(BF16)
    whole, _ = both(weights, method)
    for jobs in (2, 3, 7):
        assert_same_parts(both(weights, method, jobs=jobs)[0], whole)
    choice = kernels.ScaleChoice(method, global_scale=factor_of(whole))
    rows = kernels.quantize(weights[8:24], "nvfp4")
    flat = QuantizedArray(
        rows.weight.reshape(-1), rows.scale.reshape(-1), None, None, rows.quantization
    )
    assert kernels.quantize_into(weights[8:24].reshape(-1), flat, choice) == -1
    np.testing.assert_array_equal(rows.weight, whole.weight[8:24])
    np.testing.assert_array_equal(rows.scale, whole.scale[8:24])
