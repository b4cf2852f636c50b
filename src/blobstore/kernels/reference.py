"""The kernels in NumPy: the same arithmetic as quantize.h, operation by operation, and the same bits.

Written to be read beside quantize.h and docs/quantization.md. Everything is float32; numpy rounds each operation by
itself, so there is no fused multiply-add to switch off.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from blobstore.quant import QuantType

Array = np.ndarray[Any, Any]

_E2M1_MAX = np.float32(6)
_E4M3_MAX = np.float32(448)
_BITS_OF_2_TO_MINUS_127 = 0x400000
_E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Midpoints between neighbouring E2M1 values, and whether the midpoint itself goes up (to the even code).
_E2M1_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


class ReferenceKernel:
    """NumPy twin of the native kernels."""

    name = "reference"

    def quantize_affine(self, weights: Array, bits: int, group_size: int, words: Array, scales: Array, biases: Array) -> int:
        """See `blobstore.kernels.Kernel`."""
        bad = _first_non_finite(weights)
        if bad >= 0:
            return bad
        values = weights.astype(np.float32).reshape(-1, group_size)
        levels = np.float32(2**bits - 1)
        with np.errstate(all="ignore"):
            low, high = _running_min(values), _running_max(values)
            step = np.maximum((high - low) / levels, np.float32(1e-7))
            low_is_edge = np.abs(low) > np.abs(high)
            edge = np.where(low_is_edge, low, high)
            step = np.where(low_is_edge, step, -step)
            steps = np.rint(edge / step)
            has_bias = steps != 0
            scale = np.where(has_bias, edge / np.where(has_bias, steps, 1), step)
            bias = np.where(has_bias, edge, np.float32(0))
            exact = (values - bias[:, None]) / scale[:, None]
            codes = np.rint(np.minimum(np.where(exact > 0, exact, np.float32(0)), levels)).astype(np.uint32)
            scales[:] = scale.astype(scales.dtype)
            biases[:] = bias.astype(biases.dtype)
        words[:] = _packed(codes.reshape(-1), bits)
        return -1

    def quantize_fp(self, weights: Array, quant_type: QuantType, words: Array, scales: Array) -> int:
        """See `blobstore.kernels.Kernel`."""
        bad = _first_non_finite(weights)
        if bad >= 0:
            return bad
        group_size = quant_type.group_sizes[0]
        values = weights.astype(np.float32).reshape(-1, group_size)
        amax = np.abs(values).max(axis=1, initial=0).astype(np.float32)
        if quant_type is QuantType.NVFP4:
            scales[:] = _e4m3_bits(amax / _E2M1_MAX)
        else:
            code_max = _E4M3_MAX if quant_type is QuantType.MXFP8 else _E2M1_MAX
            scales[:] = _e8m0_bits_up(amax / code_max)
        scale = _decoded_scales(scales, quant_type)[:, None]
        with np.errstate(all="ignore"):
            exact = np.where(scale == 0, np.float32(0), values / scale)
        codes = _e4m3_bits(exact) if quant_type is QuantType.MXFP8 else _e2m1_codes(exact)
        words[:] = _packed(codes.reshape(-1), quant_type.bits)
        return -1

    def dequantize_affine(self, words: Array, scales: Array, biases: Array, bits: int, group_size: int, out: Array) -> None:
        """See `blobstore.kernels.Kernel`."""
        codes = _unpacked(words, bits).reshape(-1, group_size).astype(np.float32)
        with np.errstate(all="ignore"):
            product = codes * scales.astype(np.float32)[:, None]
            out[:] = (product + biases.astype(np.float32)[:, None]).reshape(-1)

    def dequantize_fp(self, words: Array, scales: Array, quant_type: QuantType, global_scale: float, out: Array) -> None:
        """See `blobstore.kernels.Kernel`."""
        codes = _unpacked(words, quant_type.bits)
        if quant_type is QuantType.MXFP8:
            values = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        else:
            values = _E2M1_VALUES[codes]
        with np.errstate(all="ignore"):
            product = values.reshape(-1, quant_type.group_sizes[0]) * _decoded_scales(scales, quant_type)[:, None]
            out[:] = (product * np.float32(global_scale)).reshape(-1)


def _first_non_finite(weights: Array) -> int:
    with np.errstate(invalid="ignore"):  # a signalling NaN is an answer here, not an accident
        finite = np.isfinite(weights)
    return -1 if finite.all() else int(np.argmin(finite))


def _running_min(values: Array) -> Array:
    # Not np.min: of 0 and -0 the first one seen stays, as in the loop of quantize.h.
    low = values[:, 0].copy()
    for column in values.T[1:]:
        low = np.where(column < low, column, low)
    return low


def _running_max(values: Array) -> Array:
    high = values[:, 0].copy()
    for column in values.T[1:]:
        high = np.where(column > high, column, high)
    return high


def _packed(codes: Array, bits: int) -> Array:
    """Return U32 words of ``codes`` (flat), the first code in the lowest bits."""
    per_word = 32 // bits
    shifts = (np.arange(per_word, dtype=np.uint32) * np.uint32(bits))[None, :]
    words: Array = np.bitwise_or.reduce(codes.astype(np.uint32).reshape(-1, per_word) << shifts, axis=1)
    return words


def _unpacked(words: Array, bits: int) -> Array:
    shifts = (np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits))[None, :]
    codes: Array = ((words[:, None] >> shifts) & np.uint32(2**bits - 1)).reshape(-1)
    return codes


def _e8m0_bits_up(values: Array) -> Array:
    """Return the exponent bytes of the smallest powers of two >= ``values`` (>= 0), clamped to [2^-127, 2^127]."""
    raw = values.view(np.uint32)
    exponent, mantissa = raw >> 23, raw & 0x7FFFFF
    normal = np.minimum(exponent + (mantissa != 0), 254)
    subnormal = raw > _BITS_OF_2_TO_MINUS_127
    scales: Array = np.where(exponent == 0, subnormal, normal).astype(np.uint8)
    return scales


def _e4m3_bits(values: Array) -> Array:
    """Return E4M3 bytes of ``values``, rounded half to even and saturated at 448."""
    limited = np.clip(values, -_E4M3_MAX, _E4M3_MAX)
    codes: Array = limited.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes


def _e2m1_codes(values: Array) -> Array:
    """Return E2M1 codes of ``values``, rounded half to even and saturated at 6; the sign of zero is kept."""
    magnitude = np.abs(values)
    code = np.zeros(values.shape, np.uint32)
    for midpoint, goes_up in _E2M1_MIDPOINTS:
        code += (magnitude >= midpoint) if goes_up else (magnitude > midpoint)
    return np.signbit(values).astype(np.uint32) << 3 | code


def _decoded_scales(scales: Array, quant_type: QuantType) -> Array:
    kind = ml_dtypes.float8_e4m3fn if quant_type is QuantType.NVFP4 else ml_dtypes.float8_e8m0fnu
    decoded: Array = scales.view(kind).astype(np.float32)
    return decoded
