"""The fp kernels store, bit for bit, what the number formats of ml_dtypes say.

The reference below was written from that text alone: it shares no step with quantize.h or its twin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.weights import TARGETS

from blobstore import kernels

Array = np.ndarray[Any, Any]

BF16, F16, F32 = (np.dtype(kind) for kind in (ml_dtypes.bfloat16, np.float16, np.float32))
DTYPES = [BF16, F16, F32]
ROWS, COLS = 1024, 1280


@dataclass(frozen=True)
class Format:
    """One fp type: its codes, their largest value, its scales and its group size."""

    code: Any
    largest: float
    scale: Any
    group_size: int

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return int(ml_dtypes.finfo(self.code).bits)


FORMATS = {
    "nvfp4": Format(ml_dtypes.float4_e2m1fn, 6.0, ml_dtypes.float8_e4m3fn, 16),
    "mxfp4": Format(ml_dtypes.float4_e2m1fn, 6.0, ml_dtypes.float8_e8m0fnu, 32),
    "mxfp8": Format(ml_dtypes.float8_e4m3fn, 448.0, ml_dtypes.float8_e8m0fnu, 32),
}


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
    if form.scale is ml_dtypes.float8_e4m3fn:
        scales = rounded(ratio, form.scale)
    else:
        scales = power_of_two_at_least(ratio).astype(form.scale)
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


def random_weights(dtype: np.dtype[Any], *seed: int) -> Array:
    """Return ``[1024, 1280]`` finite weights: rows of scales 1e-6 to 1e3.

    Uniform, heavy-tailed, or full of ties.
    """
    generator = np.random.default_rng(seed)
    values = generator.random((ROWS, COLS), dtype=np.float32) * 2 - 1
    values[1::3] = np.tan(values[1::3] * np.float32(1.55))
    values[2::3] = np.rint(values[2::3] * 48) / 8
    scales = 10.0 ** generator.uniform(-6, 3, (ROWS, 1))
    scales[2::3] = 2.0 ** generator.integers(-20, 10, scales[2::3].shape)
    values *= scales.astype(np.float32)
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(values, -limit, limit).astype(dtype)


def edge_weights(dtype: np.dtype[Any]) -> Array:
    """Return ``[rows, 32]`` weights, one row a corner of the number format or of the arithmetic."""
    info = ml_dtypes.finfo(dtype)
    largest, normal, subnormal = (
        float(info.max),
        float(info.smallest_normal),
        float(info.smallest_subnormal),
    )
    generator = np.random.default_rng(32)
    noise = generator.standard_normal(32)
    whole = generator.integers(-8, 9, 32)
    one_hot = np.eye(1, 32, 9)[0]
    alternating = np.where(np.arange(32) % 3, 1.0, -1.0)
    constants = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        3.3,
        -3.3,
        largest,
        -largest,
        normal,
        -normal,
        subnormal,
        -subnormal,
    ]
    rows = [np.full(32, value) for value in constants]
    rows += [
        -np.abs(noise),
        np.abs(noise),
        noise * 0.01 + one_hot * 50,
        noise * 0.01 - one_hot * 50,
    ]
    rows += [
        one_hot * largest,
        one_hot * -largest,
        alternating * largest,
        alternating * normal,
        alternating * 0.0,
    ]
    rows += [
        noise * 0.2 * largest,
        noise * normal,
        whole * subnormal,
        whole * normal,
        whole / 2,
        whole / 4,
    ]
    rows += [
        np.where(noise < 0, -0.0, noise),
        np.where(noise > 0, 0.0, noise),
        noise * 1e-30,
        noise * 1e-42,
    ]
    groups: Array = np.clip(np.array(rows), -largest, largest).astype(dtype)
    return groups


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quant_type", FORMATS)
def test_random_weights(quant_type: str, dtype: np.dtype[Any], seed: int) -> None:
    assert_equals_reference(
        random_weights(dtype, seed, dtype.itemsize, FORMATS[quant_type].bits), quant_type
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quant_type", FORMATS)
def test_edge_groups(quant_type: str, dtype: np.dtype[Any]) -> None:
    assert_equals_reference(edge_weights(dtype), quant_type)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("quant_type", FORMATS)
def test_every_16_bit_value_as_the_largest_of_a_group(
    quant_type: str, dtype: np.dtype[Any]
) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        largest = every[np.isfinite(every)].astype(np.float32)[:, None]
    inner = np.random.default_rng(16).uniform(-1, 1, (len(largest), 31)).astype(np.float32)
    assert_equals_reference(np.hstack([largest, largest * inner]).astype(dtype), quant_type)


@pytest.mark.parametrize("exponent", [-100, -1, 0, 7])
@pytest.mark.parametrize("quant_type", ["mxfp4", "mxfp8"])
def test_every_midpoint_between_codes_and_its_neighbours(quant_type: str, exponent: int) -> None:
    form = FORMATS[quant_type]
    every = np.arange(2**form.bits, dtype=np.uint8).view(form.code).astype(np.float32)
    values = np.sort(every[np.isfinite(every)])
    midpoints = (values[1:] + values[:-1]) / 2
    infinity = np.float32(np.inf)
    around = np.concatenate(
        [midpoints, np.nextafter(midpoints, infinity), np.nextafter(midpoints, -infinity)]
    )
    weights = np.zeros((-(-len(around) // 31), 32), np.float32)
    weights[:, 0] = form.largest
    weights[:, 1:] = np.resize(around, (len(weights), 31))
    codes, _ = expected_parts(weights, form)
    assert len(np.unique(codes.view(np.uint8))) == 2**form.bits - (
        2 if quant_type == "mxfp8" else 0
    )
    assert_equals_reference(np.ldexp(weights, exponent), quant_type)


def test_every_midpoint_between_nvfp4_scales_and_its_neighbours() -> None:
    scales = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    midpoints = (scales[1:] + scales[:-1]) / 2 * 6
    around = midpoints.view(np.uint32) + np.arange(-4, 5, dtype=np.int32)[:, None]
    amax = around.astype(np.uint32).view(np.float32).reshape(-1, 1)
    inner = np.random.default_rng(6).uniform(-1, 1, (len(amax), 15)).astype(np.float32)
    weights = np.hstack([amax, amax * inner])
    assert set(range(0x7F)) == set(
        expected_parts(weights, FORMATS["nvfp4"])[1].view(np.uint8).ravel().tolist()
    )
    assert_equals_reference(weights, "nvfp4")


# Eight weights that no other nvfp4 scale than 1 meets all: a search in which only they count must
# choose it.
ANCHORS = np.array([0.5, 1, 1.5, 2, 3, 4, 6, -6], np.float32)


@pytest.mark.parametrize("scale_bits", range(1, 0x7F))
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_16_bit_weight_over_every_nvfp4_scale_has_the_code_of_the_quotient(
    dtype: np.dtype[Any], scale_bits: int
) -> None:
    # quantize.h (fp_code) multiplies by the inverse and drops the product's last bits. Minmax gives
    # a scale only to weights that need it; here half of a group fixes the scale, and the other
    # half, which counts nothing, is anything.
    scale = np.array([scale_bits], np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        # Beyond 2^60 (BF16) squares overflow, and a search finds nothing; those saturate whatever
        # the scale is.
        kept = every[np.abs(every.astype(np.float32)) <= np.float32(2.0**60)]
    anything = np.resize(kept, (-(-len(kept) // 8), 8))
    weights = np.hstack(
        [np.repeat((ANCHORS * scale).astype(dtype)[None], len(anything), axis=0), anything]
    )
    importance = np.repeat([1, 0], 8)
    codes = rounded(weights.astype(np.float32) / scale, ml_dtypes.float4_e2m1fn)
    words = packed(codes, 4)
    for name, kernel in TARGETS.items():
        quantized = kernels.quantize(
            weights, "nvfp4", method="search", importance=importance, kernel=kernel
        )
        assert set(quantized.scale.ravel().tolist()) == {scale_bits}, name
        np.testing.assert_array_equal(quantized.weight, words, err_msg=name)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_16_bit_weight_beside_the_largest_of_each_nvfp4_scale_has_the_code_of_the_quotient(
    dtype: np.dtype[Any],
) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        finite = np.sort(every[np.isfinite(every)].astype(np.float32))
    for scale in (
        np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ):
        inside = finite[np.abs(finite) <= 6 * scale] if scale < 448 else finite
        weights = np.full((-(-len(inside) // 15), 16), 6 * scale, np.float32)
        weights[:, 1:] = np.resize(inside, (len(weights), 15))
        assert_equals_reference(weights.astype(dtype), "nvfp4")


@pytest.mark.parametrize("scale", [447, 448, 449, 463, 464, 465, 479, 480, 481, 512, 1e6, 1e30])
def test_nvfp4_scales_saturate_at_448_and_then_the_codes_at_6(scale: float) -> None:
    weights = np.zeros((1, 16), np.float32)
    weights[0, :6] = np.array([scale, -scale, scale / 2, 448 / 4, 448 * 5 / 6, 448 * 5.001 / 6]) * 6
    assert expected_parts(weights, FORMATS["nvfp4"])[1].view(np.uint8).tolist() == [[0x7E]]
    assert_equals_reference(weights, "nvfp4")


def test_mxfp8_codes_never_pass_448_because_the_scale_is_rounded_up() -> None:
    bits = np.float32(448).view(np.uint32) + np.arange(-64, 65, dtype=np.int32)
    amax = bits.astype(np.uint32).view(np.float32)[:, None]
    weights = np.hstack([amax, -amax, np.repeat(amax / 3, 30, axis=1)])
    quantized = kernels.quantize(weights, "mxfp8")
    assert quantized.scale.ravel().tolist() == [127] * 65 + [128] * 64
    assert set(quantized.weight.view(np.uint8)[:, 0].tolist()) == {0x7E, 0x76}
    assert_equals_reference(weights, "mxfp8")


@pytest.mark.parametrize("ulps", range(-3, 4))
@pytest.mark.parametrize("quant_type", ["mxfp4", "mxfp8"])
def test_e8m0_scales_around_every_power_of_two_down_to_the_clamp(
    quant_type: str, ulps: int
) -> None:
    powers = np.ldexp(np.float32(FORMATS[quant_type].largest), np.arange(-140, 119))
    amax = (powers.view(np.uint32) + np.int32(ulps)).astype(np.uint32).view(np.float32)[:, None]
    inner = np.linspace(-1, 1, 31, dtype=np.float32)
    assert_equals_reference(np.hstack([amax, amax * inner]), quant_type)


@pytest.mark.parametrize("quant_type", FORMATS)
def test_every_scale_and_code_dequantizes_to_their_product(quant_type: str) -> None:
    form = FORMATS[quant_type]
    codes = np.repeat(np.arange(2**form.bits, dtype=np.uint8)[None], 256, axis=0)
    codes = np.tile(codes, (1, max(1, form.group_size // 2**form.bits)))
    octets = np.arange(256, dtype=np.uint8)[:, None]
    template = kernels.quantize(np.zeros(codes.shape, np.float32), quant_type)
    template.weight[:] = packed(codes, form.bits)
    template.scale[:] = octets
    with np.errstate(all="ignore"):
        product = codes.view(form.code).astype(np.float32) * octets.view(form.scale).astype(
            np.float32
        )
    finite = np.isfinite(product)
    for name, kernel in TARGETS.items():
        values = kernels.dequantize(template, kernel=kernel)
        np.testing.assert_array_equal(values, product, err_msg=name)
        np.testing.assert_array_equal(
            np.signbit(values[finite]), np.signbit(product[finite]), err_msg=name
        )
