"""The affine kernel stores ``mx.quantize``'s bits; fp ones too, but for docs/quantization.md's."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from support.weights import (
    AFFINE,
    BF16,
    DTYPES,
    F16,
    F32,
    FP,
    edge_weights,
    every_16_bit_value,
    random_weights,
    raw,
    raw_or_nan,
)

from blobstore import kernels
from blobstore.formats.dtypes import Quantization, QuantType
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]

ROWS, COLS = 256, 1280
TIES_THAT_GO_UP = (0.75, 1.75, 3.5)

any_affine = pytest.mark.parametrize(("quant_type", "group_size"), AFFINE)
any_fp = pytest.mark.parametrize(("quant_type", "group_size"), FP)


def to_mlx(array: Array) -> mx.array:
    return mx.array(raw(array)).view(mx.bfloat16) if array.dtype == BF16 else mx.array(array)


def from_mlx(array: mx.array) -> Array:
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(BF16)
    return np.array(array)


def quantize_with_mlx(array: Array, quantization: Quantization) -> list[Array]:
    kind = quantization.quant_type
    options: dict[str, Any] = {"group_size": quantization.group_size, "bits": kind.bits}
    parts = mx.quantize(to_mlx(array), **options, mode=kind.mode, stream=mx.cpu)
    return [from_mlx(part) for part in parts]


def dequantize_with_mlx(quantized: QuantizedArray[Array], **options: Any) -> Array:
    kind = quantized.quant_type
    options |= {"group_size": quantized.group_size, "bits": kind.bits, "mode": kind.mode}
    bias = None if quantized.bias is None else mx.array(quantized.bias)
    parts = mx.array(quantized.weight), mx.array(quantized.scale), bias
    return from_mlx(mx.dequantize(*parts, dtype=mx.float32, stream=mx.cpu, **options))


def codes_of(words: Array, bits: int) -> Array:
    """Return the codes ``[rows, cols]`` of MLX's U32 words: the first in the lowest bits."""
    octets = words.view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(words), -1)


def assert_affine_equal(weights: Array, quant_type: str, group_size: int) -> None:
    ours = kernels.quantize(weights, quant_type, group_size=group_size)
    assert ours.bias is not None
    stored = (ours.weight, ours.scale, ours.bias)
    for part, expected in zip(stored, quantize_with_mlx(weights, ours.quantization), strict=True):
        np.testing.assert_array_equal(raw(part), raw(expected))


def assert_fp_equal_but_for_ties_and_zeros(weights: Array, quant_type: str) -> None:
    values = weights.astype(np.float32)
    ours = kernels.quantize(weights, quant_type)
    weight, scale = quantize_with_mlx(values, ours.quantization)
    np.testing.assert_array_equal(ours.scale, scale)
    codes = codes_of(ours.weight, ours.quant_type.bits)
    if quant_type != "mxfp8":
        kind = ml_dtypes.float8_e4m3fn if quant_type == "nvfp4" else ml_dtypes.float8_e8m0fnu
        decoded = np.repeat(ours.scale.view(kind).astype(np.float32), ours.group_size, axis=1)
        with np.errstate(all="ignore"):
            scaled = np.abs(values / decoded)
        codes = np.where(codes == 8, 0, codes - np.isin(scaled, TIES_THAT_GO_UP))
    np.testing.assert_array_equal(codes, codes_of(weight, ours.quant_type.bits))


def is_beyond_mlx(weights: Array, quant_type: str, group_size: int) -> Array:
    """Return the rows with a group for which MLX differs in more than ties and zeros."""
    amax = np.abs(weights.astype(np.float32)).reshape(len(weights), -1, group_size).max(axis=-1)
    if quant_type == "nvfp4":
        beyond = amax > np.float32(448 * 2.0**25)
    else:
        beyond = amax / np.float32(448 if quant_type == "mxfp8" else 6) <= np.float32(2.0**-128)
    rows: Array = beyond.any(axis=1)
    return rows


@any_affine
def test_affine_groups_equal_mlx(quant_type: str, group_size: int) -> None:
    inner = np.linspace(0, 1, group_size, dtype=np.float32)[None, :]
    for dtype in DTYPES:
        random = random_weights(dtype, ROWS, COLS, seed=(group_size, dtype.itemsize))
        for weights in (random, edge_weights(dtype)):
            assert_affine_equal(weights, quant_type, group_size)
    for dtype in (BF16, F16):
        every = every_16_bit_value(dtype)
        with np.errstate(invalid="ignore"):
            edges = every[np.isfinite(every)][:: group_size // 32, None].astype(np.float32)
        assert_affine_equal((edges * inner).astype(dtype), quant_type, group_size)


@any_fp
def test_fp_groups_equal_mlx_but_for_ties_and_zeros(quant_type: str, group_size: int) -> None:
    for dtype in DTYPES:
        random = random_weights(dtype, ROWS, COLS, seed=(dtype.itemsize, group_size))
        assert_fp_equal_but_for_ties_and_zeros(random, quant_type)
        weights = edge_weights(dtype)
        common = weights[~is_beyond_mlx(weights, quant_type, group_size)]
        assert len(common) > len(weights) // 2
        assert_fp_equal_but_for_ties_and_zeros(common, quant_type)


@pytest.mark.parametrize(("quant_type", "largest"), [("mxfp4", 6.0), ("mxfp8", 448.0)])
def test_e8m0_scales_equal_mlx_around_powers_of_two(quant_type: str, largest: float) -> None:
    powers = np.ldexp(np.float32(largest), np.arange(-127, 119)).astype(np.float32)
    bits = powers.view(np.uint32) + np.arange(-32, 33, dtype=np.int32)[:, None]
    weights = np.repeat(bits.astype(np.uint32).view(np.float32).reshape(-1, 1), 32, axis=1)
    ours = kernels.quantize(weights, quant_type)
    np.testing.assert_array_equal(ours.scale, quantize_with_mlx(weights, ours.quantization)[1])


@any_affine
def test_affine_dequantize_with_float32_scales_equals_mlx(quant_type: str, group_size: int) -> None:
    for weights in (random_weights(F32, ROWS, COLS, seed=(group_size,)), edge_weights(F32)):
        quantized = kernels.quantize(weights, quant_type, group_size=group_size)
        ours, theirs = kernels.dequantize(quantized), dequantize_with_mlx(quantized)
        np.testing.assert_array_equal(raw_or_nan(ours), raw_or_nan(theirs))


@any_fp
def test_every_fp_scale_and_code_equals_mlx_but_for_nan(quant_type: str, group_size: int) -> None:
    quantization = Quantization(QuantType(quant_type), group_size)
    octets = np.arange(256, dtype=np.uint8)
    words: Array = np.repeat(octets.view(np.uint32)[None], 256, axis=0)
    cols = 256 * 8 // quantization.quant_type.bits
    scales = np.repeat(octets[:, None], cols // group_size, axis=1)
    quantized = QuantizedArray(words, scales, None, None, quantization)
    ours, theirs = kernels.dequantize(quantized), dequantize_with_mlx(quantized)
    if quant_type != "nvfp4":
        assert np.isnan(ours[255]).all()
        assert np.isinf(theirs[255]).any()
        ours, theirs = ours[:255], theirs[:255]
    np.testing.assert_array_equal(raw_or_nan(ours), raw_or_nan(theirs))


def test_mlx_divides_its_nvfp4_global_scale_by_2688() -> None:
    quantized = kernels.quantize(random_weights(F32, ROWS, COLS, seed=(2688,)), "nvfp4")
    factor = np.array([0.75], np.float32)
    theirs = dequantize_with_mlx(quantized, global_scale=mx.array(factor * 6 * 448))
    scaled = replace(quantized, global_scale=factor)
    np.testing.assert_array_equal(kernels.dequantize(scaled), theirs)
