"""The kernels in NumPy: the arithmetic of quantize.h, dequantize.h and blocks.h, operation by operation, and the same bits.

Written to be read beside them and docs/quantization.md. Everything is float32; numpy rounds each
operation by itself, so there is no fused multiply-add to switch off.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from blobstore.formats.quant import QuantType
from blobstore.kernels.arrays import QuantizedArray
from blobstore.kernels.reference_search import search_affine, search_fp
from blobstore.kernels.scales import (
    BF16_NAN_BITS,
    E2M1_VALUES,
    FP8_BLOCK,
    BlockRun,
    ScaleChoice,
    code_max,
    decoded_scales,
    e2m1_codes,
    e4m3_bits,
    scale_bits,
)

Array = np.ndarray[Any, Any]


class ReferenceKernel:
    """NumPy twin of the native kernels."""

    name = "reference"

    def quantize(self, weights: Array, parts: QuantizedArray[Array], choice: ScaleChoice) -> int:
        """See `blobstore.kernels.native.Kernel`."""
        bad = _first_non_finite(weights)
        if bad >= 0 or not weights.size:
            return bad
        groups = weights.astype(np.float32).reshape(-1, parts.group_size)
        importance = _importance(choice, groups.shape)
        with np.errstate(all="ignore"):
            quantize = _quantize_affine if parts.quant_type.is_affine else _quantize_fp
            codes = quantize(groups, parts, choice, importance)
        parts.weight[:] = _packed(codes.reshape(-1), parts.quant_type.bits)
        return -1

    def dequantize(self, parts: QuantizedArray[Array], global_scale: float, out: Array) -> None:
        """See `blobstore.kernels.native.Kernel`."""
        codes = _unpacked(parts.weight, parts.quant_type.bits).reshape(-1, parts.group_size)
        with np.errstate(all="ignore"):
            values = (
                _affine_values(codes, parts)
                if parts.bias is not None
                else _fp_values(codes, parts, global_scale)
            )
            out[:] = values.reshape(-1).astype(out.dtype)

    def decode_blocks(self, codes: Array, scales: Array, run: BlockRun, out: Array) -> None:
        """See `blobstore.kernels.native.Kernel`."""
        rows, columns = np.divmod(np.arange(run.first, run.first + run.count), run.cols)
        matrices, rows = np.divmod(rows, run.rows)
        block_rows, block_columns = run.blocks
        of_each = (
            (matrices * block_rows + rows // FP8_BLOCK) * block_columns
            + columns // FP8_BLOCK
            - run.scales.start
        )
        with np.errstate(all="ignore"):
            values = (
                codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
                * scales.astype(np.float32)[of_each]
            )
            out[:] = values.astype(out.dtype)
        out.view(np.uint16)[np.isnan(values)] = BF16_NAN_BITS


def _importance(choice: ScaleChoice, shape: tuple[int, ...]) -> Array | None:
    if choice.importance is None or not choice.importance.size:
        return None
    columns = (np.arange(shape[0] * shape[1]) + choice.first_column) % choice.importance.size
    return choice.importance[columns].reshape(shape)


def _quantize_affine(
    groups: Array, parts: QuantizedArray[Array], choice: ScaleChoice, importance: Array | None
) -> Array:
    levels = np.float32(2**parts.quant_type.bits - 1)
    scale, bias = _affine_of(_running_min(groups), _running_max(groups), levels)
    stored = (scale.astype(parts.scale.dtype), bias.astype(parts.scale.dtype))
    if choice.method == "search":
        candidates = choice.candidates_for(parts.quant_type)
        scale, bias, *stored_values = search_affine(
            groups, importance, (scale, bias), levels, candidates, parts.scale.dtype
        )
        stored = (
            stored_values[0].astype(parts.scale.dtype),
            stored_values[1].astype(parts.scale.dtype),
        )
    parts.scale[:], np.asarray(parts.bias)[:] = stored
    exact = (groups - bias[:, None]) / scale[:, None]
    return np.rint(np.minimum(np.where(exact > 0, exact, np.float32(0)), levels)).astype(np.uint32)


def _affine_of(low: Array, high: Array, levels: np.float32) -> tuple[Array, Array]:
    """Return MLX's scale and bias of each group: the edge farther from zero is met exactly, and zero is a code."""
    step = np.maximum((high - low) / levels, np.float32(1e-7))
    low_is_edge = np.abs(low) > np.abs(high)
    edge = np.where(low_is_edge, low, high)
    step = np.where(low_is_edge, step, -step)
    steps = np.rint(edge / step)
    has_bias = steps != 0
    return np.where(has_bias, edge / np.where(has_bias, steps, 1), step), np.where(
        has_bias, edge, np.float32(0)
    )


def _quantize_fp(
    groups: Array, parts: QuantizedArray[Array], choice: ScaleChoice, importance: Array | None
) -> Array:
    kind = parts.quant_type
    groups = groups * np.float32(1 / choice.global_scale)
    scales = scale_bits(np.abs(groups).max(axis=1).astype(np.float32) / code_max(kind), kind)
    parts.scale[:] = (
        search_fp(groups, importance, scales, kind) if choice.method == "search" else scales
    )
    scale = decoded_scales(parts.scale, kind)[:, None]
    exact = np.where(scale == 0, np.float32(0), groups / scale)
    return e4m3_bits(exact) if kind is QuantType.MXFP8 else e2m1_codes(exact)


def _affine_values(codes: Array, parts: QuantizedArray[Array]) -> Array:
    product = codes.astype(np.float32) * parts.scale.astype(np.float32)[:, None]
    values: Array = product + np.asarray(parts.bias).astype(np.float32)[:, None]
    return values


def _fp_values(codes: Array, parts: QuantizedArray[Array], global_scale: float) -> Array:
    if parts.quant_type is QuantType.MXFP8:
        values = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        values = E2M1_VALUES[codes]
    product: Array = (
        values * decoded_scales(parts.scale, parts.quant_type)[:, None] * np.float32(global_scale)
    )
    return product


def _first_non_finite(weights: Array) -> int:
    with np.errstate(invalid="ignore"):  # a signalling NaN is an answer here, not an accident
        finite = np.isfinite(weights)
    return -1 if finite.all() else int(np.argmin(finite))


def _running_min(groups: Array) -> Array:
    # Not np.min: of 0 and -0 the first one seen stays, as in a loop.
    low = groups[:, 0].copy()
    for column in groups.T[1:]:
        low = np.where(column < low, column, low)
    return low


def _running_max(groups: Array) -> Array:
    high = groups[:, 0].copy()
    for column in groups.T[1:]:
        high = np.where(column > high, column, high)
    return high


def _packed(codes: Array, bits: int) -> Array:
    """Return U32 words of ``codes`` (flat), the first code in the lowest bits."""
    per_word = 32 // bits
    shifts = (np.arange(per_word, dtype=np.uint32) * np.uint32(bits))[None, :]
    words: Array = np.bitwise_or.reduce(
        codes.astype(np.uint32).reshape(-1, per_word) << shifts, axis=1
    )
    return words


def _unpacked(words: Array, bits: int) -> Array:
    shifts = (np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits))[None, :]
    codes: Array = ((words[:, None] >> shifts) & np.uint32(2**bits - 1)).reshape(-1)
    return codes
