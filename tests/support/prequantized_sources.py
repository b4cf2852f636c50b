"""Models as MLX, FP8 and NVFP4 exporters write them, for fixtures/ollama-records and others.

The arithmetic is that of the tool that made the records, since the digests hold for exactly these
bytes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
Named = Iterator[tuple[str, Array]]

BF16, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
_BLOCK = 128
E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _quantized(
    tensors: Mapping[str, Array], make: Callable[[str, Array], Named], *kept: str
) -> Tensors:
    """Return a model whose matrices ``make`` quantized, but for norms and words that are kept."""
    made: Tensors = {}
    for name, array in tensors.items():
        is_matrix = array.ndim == 2 and name.endswith(".weight")
        if is_matrix and not any(word in name for word in ("norm", *kept)):
            made |= make(name, array)
        else:
            made[name] = array
    return made


def mlx_model(
    tensors: Mapping[str, Array],
    usual: tuple[int, int, str],
    other: Mapping[str, tuple[int, int, str]] | None = None,
) -> Tensors:
    """Return a model quantized by MLX; settings are (group size, bits, mode), ``other`` by name."""

    def make(name: str, weight: Array) -> Named:
        """Yield codes, scales and, for affine ones, biases."""
        group_size, bits, mode = (other or {}).get(name, usual)
        is_bf16 = weight.dtype == BF16
        given = mx.array(weight.view(np.uint16)).view(mx.bfloat16) if is_bf16 else mx.array(weight)
        base = name.removesuffix(".weight")
        arrays = mx.quantize(given, group_size=group_size, bits=bits, mode=mode)
        for part, array in zip((name, f"{base}.scales", f"{base}.biases"), arrays, strict=False):
            is_bf16 = array.dtype == mx.bfloat16
            yield part, np.array(array.view(mx.uint16)).view(BF16) if is_bf16 else np.array(array)

    return _quantized(tensors, make)


def fp8_model(tensors: Mapping[str, Array], *, scale_dtype: Any = np.float32) -> Tensors:

    def make(name: str, weight: Array) -> Named:
        """Yield E4M3 codes and one scale for each block, ragged edges included."""
        rows, cols = weight.shape
        block_rows, block_cols = -(-rows // _BLOCK), -(-cols // _BLOCK)
        padded = np.zeros((block_rows * _BLOCK, block_cols * _BLOCK), np.float32)
        padded[:rows, :cols] = weight.astype(np.float32)
        blocks = padded.reshape(block_rows, _BLOCK, block_cols, _BLOCK)
        scales = (np.maximum(np.abs(blocks).max((1, 3)), 1e-12) / 448.0).astype(scale_dtype)
        scaled = blocks / scales.astype(np.float32)[:, None, :, None]
        yield name, scaled.reshape(padded.shape)[:rows, :cols].astype(F8)
        yield f"{name}_scale_inv", scales

    return _quantized(tensors, make, "lm_head", "embed", ".gate.")


def nvfp4_model(tensors: Mapping[str, Array], *, modelopt: bool) -> Tensors:
    """Return NVFP4 with ModelOpt's global scale, a factor, or compressed-tensors' divisor."""

    def make(name: str, weight: Array) -> Named:
        base = name.removesuffix(".weight")
        packed, scales, factor = _packed_nvfp4(weight)
        yield name if modelopt else f"{base}.weight_packed", packed
        yield f"{base}.weight_scale", scales
        if modelopt:
            yield f"{base}.weight_scale_2", np.array(factor, np.float32)
            yield f"{base}.input_scale", np.array(0.01, np.float32)
        else:
            yield f"{base}.weight_global_scale", np.array([1 / factor], np.float32)
            yield f"{base}.input_global_scale", np.array([100.0], np.float32)

    return _quantized(tensors, make, "lm_head", "embed", ".gate.")


def _packed_nvfp4(weight: Array) -> tuple[Array, Array, np.float32]:
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
