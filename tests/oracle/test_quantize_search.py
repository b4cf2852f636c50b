"""The search of the fp types finds the scale with the smallest squared error of all.

The optimum is found here in float64 by trying the scales one by one; it shares no step with
search_fp.h or its twin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.weights import BF16, DTYPES, F32, random_importance, shaped_groups, squared_errors

from blobstore import kernels

Array = np.ndarray[Any, Any]

CHUNK = 2048  # groups at a time, which the processor's cache holds
# A candidate must be better by 2^-14 to replace another of minmax, and float32 rounds the sums.
WITHIN = 1 + 1e-4


@dataclass(frozen=True)
class Format:
    """One fp type: its codes and its scales."""

    code: Any
    scale: Any
    group_size: int

    @property
    def scales(self) -> Array:
        """All scales above 0 in float64, the smallest first."""
        values = np.arange(256, dtype=np.uint8).view(self.scale).astype(np.float64)
        return np.unique(values[np.isfinite(values) & (values > 0)])


FORMATS = {
    "nvfp4": Format(ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, 16),
    "mxfp4": Format(ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu, 32),
    "mxfp8": Format(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, 32),
}

any_type = pytest.mark.parametrize("quant_type", FORMATS)


def nearest_codes(values: Array, kind: Any) -> Array:
    """Return the values of a small float type nearest to float64 ``values`` >= 0, in place.

    Saturating.
    """
    info = ml_dtypes.finfo(kind)
    np.minimum(values, float(info.max), out=values)
    # The power of two at or below each value, at least the smallest normal one; codes are
    # 2^-mantissa bits of it apart.
    power = (values.view(np.uint64) & np.uint64(0x7FF0000000000000)).view(np.float64)
    np.maximum(power, float(info.smallest_normal), out=power)
    power *= 2.0 ** (
        52 - info.nmant
    )  # whose unit in the last place is that distance: adding it rounds
    values += power
    values -= power
    return values


def errors_of(
    magnitudes: Array, scale: Array | float, kind: Any, importance: Array | float
) -> Array:
    """Return the squared error of each group of ``[groups, group_size]`` with a scale."""
    difference = nearest_codes(magnitudes / scale, kind)
    difference *= scale
    difference -= magnitudes
    difference *= difference
    difference *= importance
    total: Array = difference.sum(axis=1)
    return total


def least_errors(weights: Array, form: Format, importance: Array | float, *, cut: bool) -> Array:
    """Return the smallest error of each group over all scales, and over a scale of zero.

    With ``cut`` only the powers of two that can be best are tried. Going down from the smallest one
    that saturates no weight, ``top``: (1) above it none is better, because every value that is a
    code times 2s is one of s too, or beyond the largest, which no weight is beyond; (2) below some
    scale none is better any more: what saturation alone costs, the squares of ``|w| - largest *
    s``, only grows as s falls, so it is over when that passes the least error so far.
    """
    magnitudes = np.abs(weights.astype(np.float64))
    least: Array = (magnitudes**2 * importance).sum(axis=1)
    if not cut:
        for scale in form.scales:
            np.minimum(least, errors_of(magnitudes, scale, form.code, importance), out=least)
        return least
    largest = float(ml_dtypes.finfo(form.code).max)
    amax = magnitudes.max(axis=1, keepdims=True)
    exponent = (
        np.ceil(np.log2(np.maximum(amax, 2.0**-300) / largest)) + 1
    )  # one more, lest log2 was rounded down
    scale = 2.0 ** np.clip(exponent, -127, 127)
    while True:
        saturated = (np.maximum(magnitudes - largest * scale, 0) ** 2 * importance).sum(axis=1)
        is_open = (saturated <= least) & (scale[:, 0] >= 2.0**-127)
        if not is_open.any():
            return least
        errors = errors_of(magnitudes[is_open], scale[is_open], form.code, importance)
        least[is_open] = np.minimum(least[is_open], errors)
        scale = scale / 2


def assert_optimal(
    weights: Array, quant_type: str, importance: Array | None = None, *, cut: bool
) -> None:
    """Fail if any group's error differs from the optimum."""
    form = FORMATS[quant_type]
    quantized = kernels.quantize(weights, quant_type, method="search", importance=importance)
    errors = squared_errors(weights, quantized, importance)
    counted = 1.0 if importance is None else importance.astype(np.float64)
    chunks = [
        least_errors(weights[start : start + CHUNK], form, counted, cut=cut)
        for start in range(0, len(weights), CHUNK)
    ]
    optimum = np.concatenate(chunks)
    worse = errors > optimum * WITHIN
    assert not worse.any(), (
        f"{worse.sum()} groups, first {np.flatnonzero(worse)[0]}: {(errors / optimum)[worse].max()}"
    )
    assert (errors >= optimum * (1 - 1e-12)).all()


@pytest.mark.parametrize(
    "kind", [ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn], ids=lambda kind: kind.__name__
)
def test_the_codes_of_this_oracle_are_those_of_ml_dtypes(kind: Any) -> None:
    bits = ml_dtypes.finfo(kind).bits
    codes = np.arange(2 ** (bits - 1), dtype=np.uint8).view(kind).astype(np.float32)
    codes = codes[np.isfinite(codes)]
    midpoints = (codes[1:] + codes[:-1]) / 2
    up, down = (np.nextafter(midpoints, np.float32(end)) for end in (np.inf, -np.inf))
    values = np.concatenate(
        [codes, midpoints, up, down, np.linspace(0, codes[-1], 10_001, dtype=np.float32)]
    )
    np.testing.assert_array_equal(
        nearest_codes(values.astype(np.float64), kind), values.astype(kind).astype(np.float64)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@any_type
def test_no_scale_is_better_than_the_one_that_search_finds(
    quant_type: str, dtype: np.dtype[Any]
) -> None:
    groups = 35_000  # and 105,000 of each type
    assert_optimal(
        shaped_groups(dtype, groups, FORMATS[quant_type].group_size),
        quant_type,
        cut=quant_type != "nvfp4",
    )


@any_type
def test_no_scale_at_all_is_better_than_the_one_that_search_finds(quant_type: str) -> None:
    assert_optimal(
        shaped_groups(F32, 2000, FORMATS[quant_type].group_size, seed=(1,)), quant_type, cut=False
    )


@pytest.mark.parametrize("cut", [False, True], ids=["all scales", "cut"])
@any_type
def test_no_scale_is_better_with_importance(quant_type: str, cut: bool) -> None:
    group_size = FORMATS[quant_type].group_size
    for seed in range(3):
        weights = shaped_groups(
            BF16, 8000 if cut or quant_type == "nvfp4" else 800, group_size, seed=(seed,)
        )
        importance = random_importance(group_size, seed)
        if seed == 2:  # few columns count
            importance[2:] = 0
        assert_optimal(weights, quant_type, importance, cut=cut and quant_type != "nvfp4")


@pytest.mark.parametrize("exponent", [-149, -130, -126, -60, -20, 20, 59], ids=str)
@any_type
def test_no_scale_is_better_at_the_ends_of_float32(quant_type: str, exponent: int) -> None:
    noise = np.random.default_rng(exponent + 200).standard_normal(
        (500, FORMATS[quant_type].group_size)
    )
    weights = np.ldexp(np.round(noise * 2**12), exponent - 12 if exponent > 0 else exponent).astype(
        np.float32
    )
    assert_optimal(weights, quant_type, cut=False)
