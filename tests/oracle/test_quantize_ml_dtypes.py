"""The fp kernels store, bit for bit, what the number formats of ml_dtypes say.

The reference below was written from that text alone: it shares no step with quantize.h or its twin.
The scale of a search is the best of all, tried one by one in float64.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.weights import (
    DTYPES,
    F32,
    TARGETS,
    edge_weights,
    random_importance,
    random_weights,
    shaped_groups,
    squared_errors,
)

from blobstore import kernels

Array = np.ndarray[Any, Any]

E2M1, E4M3, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


@dataclass(frozen=True)
class Format:
    """One fp type: its codes, their largest value, its scales and its group size."""

    code: Any
    largest: float
    scale: Any
    group_size: int

    @property
    def bits(self) -> int:
        return int(ml_dtypes.finfo(self.code).bits)

    @property
    def scales(self) -> Array:
        """All scales above 0 in float64, the smallest first."""
        values = np.arange(256, dtype=np.uint8).view(self.scale).astype(np.float64)
        return np.unique(values[np.isfinite(values) & (values > 0)])


FORMATS = {
    "nvfp4": Format(E2M1, 6.0, E4M3, 16),
    "mxfp4": Format(E2M1, 6.0, E8M0, 32),
    "mxfp8": Format(E4M3, 448.0, E8M0, 32),
}

any_type = pytest.mark.parametrize("quant_type", FORMATS)


def rounded(values: Array, kind: Any) -> Array:
    """Return ``values`` in a small float type: half to even, saturating at its largest value."""
    largest = np.float32(ml_dtypes.finfo(kind).max)
    return np.clip(values, -largest, largest).astype(kind)


def power_of_two_at_least(values: Array) -> Array:
    """Return 2^ceil(log2(value)), the exponent clamped to [-127, 127]; log2(0) is -infinity."""
    fraction, exponent = np.frexp(values)
    exponent = np.where(fraction == 0.5, exponent - 1, exponent)
    return np.ldexp(np.float32(1), np.where(values == 0, -127, np.clip(exponent, -127, 127)))


def expected_parts(weights: Array, form: Format) -> tuple[Array, Array]:
    """Return codes ``[rows, cols]`` and scales ``[rows, cols / group]`` in ml_dtypes' types."""
    groups = weights.astype(np.float32).reshape(len(weights), -1, form.group_size)
    ratio = np.abs(groups).max(axis=-1) / np.float32(form.largest)
    scales = (
        rounded(ratio, E4M3) if form.scale is E4M3 else power_of_two_at_least(ratio).astype(E8M0)
    )
    divisor = scales.astype(np.float32)[..., None]
    with np.errstate(all="ignore"):
        quotient = np.where(divisor == 0, np.float32(0), groups / divisor)
    return rounded(quotient, form.code).reshape(weights.shape), scales


def packed(codes: Array, bits: int) -> Array:
    """Return the U32 words of the codes, the first code in the lowest bits (little-endian)."""
    octets = codes.view(np.uint8)
    if bits == 4:
        octets = octets[:, 0::2] + octets[:, 1::2] * np.uint8(16)
    return np.ascontiguousarray(octets).view("<u4")


def assert_equals_reference(weights: Array, quant_type: str) -> None:
    form = FORMATS[quant_type]
    codes, scales = expected_parts(weights, form)
    words = packed(codes, form.bits)
    for name, kernel in TARGETS.items():
        quantized = kernels.quantize(weights, quant_type, kernel=kernel)
        np.testing.assert_array_equal(quantized.scale, scales.view(np.uint8), err_msg=name)
        np.testing.assert_array_equal(quantized.weight, words, err_msg=name)


@any_type
def test_random_weights_and_edges(quant_type: str) -> None:
    for dtype in DTYPES:
        assert_equals_reference(random_weights(dtype, 192, 640), quant_type)
        assert_equals_reference(edge_weights(dtype), quant_type)


@pytest.mark.parametrize("quant_type", ["mxfp4", "mxfp8"])
def test_every_midpoint_between_codes_and_its_neighbours(quant_type: str) -> None:
    form = FORMATS[quant_type]
    every = np.arange(2**form.bits, dtype=np.uint8).view(form.code).astype(np.float32)
    values = np.sort(every[np.isfinite(every)])
    middle = (values[1:] + values[:-1]) / 2
    ends = (np.float32(np.inf), np.float32(-np.inf))
    near = np.concatenate([middle, *(np.nextafter(middle, end) for end in ends)])
    weights = np.zeros((-(-len(near) // 31), 32), np.float32)
    weights[:, 0] = form.largest
    weights[:, 1:] = np.resize(near, (len(weights), 31))
    codes, _ = expected_parts(weights, form)
    assert len(np.unique(codes.view(np.uint8))) == len(every) - 2 * (quant_type == "mxfp8")
    for exponent in (-100, -1, 0, 7):
        assert_equals_reference(np.ldexp(weights, exponent), quant_type)


def test_every_midpoint_between_nvfp4_scales_and_its_neighbours() -> None:
    scales = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    middle = ((scales[1:] + scales[:-1]) / 2 * 6).astype(np.float32)
    near = middle.view(np.uint32) + np.arange(-4, 5)[:, None]  # some ulps to both sides
    amax = near.astype(np.uint32).view(np.float32).reshape(-1, 1)
    inner = np.random.default_rng(6).uniform(-1, 1, (len(amax), 15)).astype(np.float32)
    weights = np.hstack([amax, amax * inner])
    found = expected_parts(weights, FORMATS["nvfp4"])[1].view(np.uint8)
    assert set(found.ravel().tolist()) == set(range(0x7F))
    assert_equals_reference(weights, "nvfp4")


def least_errors(weights: Array, form: Format, importance: Array | float) -> Array:
    """Return the smallest error of each group over all scales, and over a scale of zero."""
    magnitudes = np.abs(weights.astype(np.float64))
    least: Array = (magnitudes**2 * importance).sum(axis=1)
    for scale in form.scales:
        codes = np.minimum(magnitudes / scale, form.largest).astype(form.code).astype(np.float64)
        errors = ((codes * scale - magnitudes) ** 2 * importance).sum(axis=1)
        np.minimum(least, errors, out=least)
    return least


@any_type
def test_no_scale_is_better_than_the_one_that_a_search_finds(quant_type: str) -> None:
    form = FORMATS[quant_type]
    noise = np.random.default_rng(60).standard_normal((40, form.group_size))
    ends = [
        np.ldexp(np.round(noise * 2**12), exponent - 12 * (exponent > 0)).astype(np.float32)
        for exponent in (-149, -130, -126, -60, -20, 20, 59)
    ]
    cases: list[tuple[Array, Array | None]] = [
        *((shaped_groups(dtype, 300, form.group_size), None) for dtype in DTYPES),
        (np.concatenate(ends), None),
        (shaped_groups(F32, 300, form.group_size), random_importance(form.group_size)),
    ]
    for weights, importance in cases:
        quantized = kernels.quantize(weights, quant_type, method="search", importance=importance)
        errors = squared_errors(weights, quantized, importance)
        counted = 1.0 if importance is None else importance.astype(np.float64)
        optimum = least_errors(weights, form, counted)
        # A candidate must be better by 2^-14 to replace another of minmax; float32 rounds the sums.
        assert (errors <= optimum * (1 + 1e-4)).all()
        assert (errors >= optimum * (1 - 1e-12)).all()
