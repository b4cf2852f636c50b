"""The quantized sources of fixtures/ollama-records, as MLX, FP8 and NVFP4 exporters write.

The arithmetic is that of the tool that made the records, since the digests hold for exactly these
bytes. Which tensors are quantized: every matrix that is no norm, except those whose names hold a
word of `KEPT`, which MLX's quantize too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]

BF16, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
KEPT = ("lm_head", "embed", ".gate.")
E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def mlx_array(array: Array) -> Any:
    """Return an mlx array of the same bits."""
    return (
        mx.array(array.view(np.uint16)).view(mx.bfloat16)
        if array.dtype == BF16
        else mx.array(array)
    )


def numpy_array(array: Any) -> Array:
    """Return a numpy array of an mlx array's bits."""
    return (
        np.array(array.view(mx.uint16)).view(BF16)
        if array.dtype == mx.bfloat16
        else np.array(array)
    )


def mlx_quantized(
    name: str, weight: Array, group_size: int, bits: int, mode: str
) -> Iterator[tuple[str, Array]]:
    """Yield what MLX stores for the weight ``name``: codes, scales and, for affine ones, biases."""
    arrays = mx.quantize(mlx_array(weight), group_size=group_size, bits=bits, mode=mode)
    base = name.removesuffix(".weight")
    yield from zip(
        (name, f"{base}.scales", f"{base}.biases"), map(numpy_array, arrays), strict=False
    )


def block_fp8(
    name: str,
    weight: Array,
    *,
    suffix: str = "_scale_inv",
    scale_dtype: Any = np.float32,
    block: int = 128,
) -> Iterator[tuple[str, Array]]:
    """Yield E4M3 codes and one scale for each block of the weight, ragged edges included."""
    rows, cols = weight.shape
    block_rows, block_cols = -(-rows // block), -(-cols // block)
    padded = np.zeros((block_rows * block, block_cols * block), np.float32)
    padded[:rows, :cols] = weight.astype(np.float32)
    blocks = padded.reshape(block_rows, block, block_cols, block)
    scales = (np.maximum(np.abs(blocks).max((1, 3)), 1e-12) / 448.0).astype(scale_dtype)
    codes = (
        (blocks / scales.astype(np.float32)[:, None, :, None])
        .reshape(padded.shape)[:rows, :cols]
        .astype(F8)
    )
    yield name, codes
    yield name + suffix, scales


def packed_nvfp4(weight: Array) -> tuple[Array, Array, np.float32]:
    """Return E2M1 codes (two a byte), E4M3 scales of 16 weights, and the global multiplier."""
    values = weight.astype(np.float32)
    rows, cols = values.shape
    factor = np.float32(np.abs(values).max() / (6 * 448))
    groups = values.reshape(rows, cols // 16, 16)
    scales = (np.abs(groups).max(-1) / 6 / factor).astype(F8)
    quotients = groups / np.maximum(scales.astype(np.float32) * factor, 1e-20)[..., None]
    magnitudes = np.abs(np.abs(quotients)[..., None] - E2M1_MAGNITUDES).argmin(-1).astype(np.uint8)
    codes = (magnitudes | (quotients < 0).astype(np.uint8) << 3).reshape(rows, cols)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8), scales, factor


def modelopt_nvfp4(name: str, weight: Array) -> Iterator[tuple[str, Array]]:
    """Yield what ModelOpt stores for the weight ``name``: its global scale is multiplied by."""
    packed, scales, factor = packed_nvfp4(weight)
    base = name.removesuffix(".weight")
    yield name, packed
    yield f"{base}.weight_scale", scales
    yield f"{base}.weight_scale_2", np.array(factor, np.float32)
    yield f"{base}.input_scale", np.array(0.01, np.float32)


def compressed_nvfp4(name: str, weight: Array) -> Iterator[tuple[str, Array]]:
    """Yield compressed-tensors' tensors of the weight ``name``, with a global divisor."""
    packed, scales, factor = packed_nvfp4(weight)
    base = name.removesuffix(".weight")
    yield f"{base}.weight_packed", packed
    yield f"{base}.weight_scale", scales
    yield f"{base}.weight_global_scale", np.array([1 / factor], np.float32)
    yield f"{base}.input_global_scale", np.array([100.0], np.float32)


def is_quantized(name: str, array: Array, kept: tuple[str, ...] = KEPT) -> bool:
    """Return True for a matrix that an exporter quantizes."""
    matrix = array.ndim == 2 and name.endswith(".weight") and "norm" not in name
    return matrix and not any(word in name for word in kept)


def mlx_model(
    tensors: Mapping[str, Array],
    usual: tuple[int, int, str],
    other: Mapping[str, tuple[int, int, str]] | None = None,
) -> Tensors:
    """Return a model with every matrix as MLX quantizes it, and the ``other`` ones by name.

    A setting is (group size, bits, mode).
    """
    quantized: Tensors = {}
    for name, array in tensors.items():
        if is_quantized(name, array, ()):
            quantized |= mlx_quantized(name, array, *(other or {}).get(name, usual))
        else:
            quantized[name] = array
    return quantized


def fp8_model(tensors: Mapping[str, Array], **options: Any) -> Tensors:
    """Return a model with its matrices in block FP8; ``options`` as `block_fp8`."""
    quantized: Tensors = {}
    for name, array in tensors.items():
        quantized |= (
            dict(block_fp8(name, array, **options)) if is_quantized(name, array) else {name: array}
        )
    return quantized


def nvfp4_model(tensors: Mapping[str, Array], *, modelopt: bool) -> Tensors:
    """Return a model with its matrices in NVFP4 of ModelOpt or of compressed-tensors."""
    make = modelopt_nvfp4 if modelopt else compressed_nvfp4
    quantized: Tensors = {}
    for name, array in tensors.items():
        quantized |= dict(make(name, array)) if is_quantized(name, array) else {name: array}
    return quantized
