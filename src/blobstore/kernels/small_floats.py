"""The number formats of codes and scales in NumPy: the twin of formats.h."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from blobstore.quant import QuantType

Array = np.ndarray[Any, Any]

FP8_BLOCK = 128
"""Rows and columns of the square that shares a scale in a block FP8 matrix."""
BF16_NAN_BITS = 0x7FC0
"""What every NaN becomes in BF16."""
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_E2M1_MAX = np.float32(6)
_E4M3_MAX = np.float32(448)
_BITS_OF_2_TO_MINUS_127 = 0x400000
# Midpoints between neighbouring E2M1 values, and whether the midpoint itself goes up (to the even code).
_E2M1_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def code_max(quant_type: QuantType) -> np.float32:
    """Return the largest code of a type: 6 or 448."""
    return _E4M3_MAX if quant_type is QuantType.MXFP8 else _E2M1_MAX


def scale_bits(values: Array, quant_type: QuantType) -> Array:
    """Return scales of a type for values >= 0: E4M3, rounded half to even, for nvfp4, else E8M0, rounded up."""
    return e4m3_bits(values) if quant_type is QuantType.NVFP4 else e8m0_bits_up(values)


def decoded_scales(scales: Array, quant_type: QuantType) -> Array:
    """Return the values of stored scales (U8) as float32."""
    kind = ml_dtypes.float8_e4m3fn if quant_type is QuantType.NVFP4 else ml_dtypes.float8_e8m0fnu
    decoded: Array = scales.view(kind).astype(np.float32)
    return decoded


def e8m0_bits_up(values: Array) -> Array:
    """Return the exponent bytes of the smallest powers of two >= ``values`` (>= 0), clamped to [2^-127, 2^127]."""
    raw = values.view(np.uint32)
    exponent, mantissa = raw >> 23, raw & 0x7FFFFF
    normal = np.minimum(exponent + (mantissa != 0), 254)
    subnormal = raw > _BITS_OF_2_TO_MINUS_127
    scales: Array = np.where(exponent == 0, subnormal, normal).astype(np.uint8)
    return scales


def e4m3_bits(values: Array) -> Array:
    """Return E4M3 bytes of ``values``, rounded half to even and saturated at 448."""
    limited = np.clip(values, -_E4M3_MAX, _E4M3_MAX)
    codes: Array = limited.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes


def e2m1_codes(values: Array) -> Array:
    """Return E2M1 codes of ``values``, rounded half to even and saturated at 6; the sign of zero is kept."""
    magnitude = np.abs(values)
    code = np.zeros(values.shape, np.uint32)
    for midpoint, goes_up in _E2M1_MIDPOINTS:
        code += (magnitude >= midpoint) if goes_up else (magnitude > midpoint)
    return np.signbit(values).astype(np.uint32) << 3 | code


def rounded_magnitudes(values: Array, quant_type: QuantType) -> Array:
    """Return the values of the codes of ``values`` >= 0, NaN as the largest, as float32."""
    largest = code_max(quant_type)
    limited = np.where(values < largest, values, largest)
    if quant_type is QuantType.MXFP8:
        decoded: Array = limited.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return decoded
    return E2M1_VALUES[e2m1_codes(limited)]
