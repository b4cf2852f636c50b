"""Quantized weights as each producer stores them: random codes and scales, and their values.

The values are computed here with ml_dtypes and plain NumPy, MLX's by `mx.dequantize`: nothing of
blobstore is asked.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1_VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
FP8_CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
GROUPS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}


@dataclass(frozen=True)
class Stored:
    """One weight of a source: its tensors in order, their roles, and its values in float32.

    ``arrays``: the tensors by the suffix of the array that is stored for them, as their bytes must
    be stored.
    """

    name: str
    tensors: Tensors
    values: Array
    quant_type: str
    group_size: int
    arrays: Tensors


@dataclass(frozen=True)
class Kind:
    """A producer's format: a function that makes a weight, and the settings in config.json."""

    make: Callable[[str, tuple[int, ...]], Stored]
    config: Mapping[str, Any] = field(default_factory=dict)


def _random(base: str, *words: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr((base, *words)).encode()))


def mlx_affine(bits: int, group_size: int, dtype: Any = BF16) -> Kind:
    """Return MLX's affine format of that many bits, groups and dtype of scales."""
    how: dict[str, Any] = {"group_size": group_size, "bits": bits}

    def make(base: str, shape: tuple[int, ...]) -> Stored:
        generator = _random(base, bits, group_size, str(dtype))
        *lead, cols = shape
        words = generator.integers(2**32, size=(*lead, cols * bits // 32), dtype=np.uint32)
        groups = (*lead, cols // group_size)
        scales, biases = ((generator.standard_normal(groups) * 0.1).astype(dtype) for _ in range(2))
        # With float32 scales MLX computes in float32; rounding the result to another dtype is the
        # reader's business.
        wide, shift = (mx.array(array.astype(np.float32)) for array in (scales, biases))
        values = mx.dequantize(mx.array(words), wide, shift, mode="affine", stream=mx.cpu, **how)
        tensors = {f"{base}.weight": words, f"{base}.scales": scales, f"{base}.biases": biases}
        arrays = {"": words, ".scale": scales, ".bias": biases}
        return Stored(f"{base}.weight", tensors, np.array(values), f"int{bits}", group_size, arrays)

    return Kind(make, {"quantization": how})


def mlx_float(mode: str) -> Kind:
    """Return MLX's format of small floats: nvfp4, mxfp4 or mxfp8."""
    bits = 8 if mode == "mxfp8" else 4
    how: dict[str, Any] = {"group_size": GROUPS[mode], "bits": bits, "mode": mode}

    def make(base: str, shape: tuple[int, ...]) -> Stored:
        generator = _random(base, mode)
        *lead, cols = shape
        words = _finite_octets(generator, (*lead, cols * bits // 8), bits).view(np.uint32)
        groups = (*lead, cols // GROUPS[mode])
        scales = generator.integers(110, 126, size=groups, dtype=np.uint8)
        given = mx.array(words), mx.array(scales)
        values = mx.dequantize(*given, dtype=mx.float32, stream=mx.cpu, **how)
        tensors: Tensors = {f"{base}.weight": words, f"{base}.scales": scales}
        arrays: Tensors = {"": words, ".scale": scales}
        return Stored(f"{base}.weight", tensors, np.array(values), mode, GROUPS[mode], arrays)

    return Kind(make, {"quantization": how})


def _finite_octets(generator: np.random.Generator, shape: tuple[int, ...], bits: int) -> Array:
    """Return random bytes; of 8-bit floats, none that is E4M3's NaN, which is S.1111.111."""
    octets = generator.integers(256, size=shape, dtype=np.uint8)
    return np.where(octets & 127 == 127, 0, octets) if bits == 8 else octets


def _unpacked(octets: Array) -> Array:
    values: Array = E2M1_VALUES[np.stack([octets & 15, octets >> 4], -1)]
    return values.reshape(*octets.shape[:-1], -1)


MODELOPT = ("weight", "weight_scale", "weight_scale_2", "input_scale")
COMPRESSED = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")


def nvfp4(*, modelopt: bool, scalar: bool = True) -> Kind:
    """Return NVFP4: ModelOpt stores its global scale, compressed-tensors the reciprocal."""

    def make(base: str, shape: tuple[int, ...]) -> Stored:
        generator = _random(base, "nvfp4")
        *lead, cols = shape
        octets = generator.integers(256, size=(*lead, cols // 2), dtype=np.uint8)
        scales = generator.uniform(0.01, 400, size=(*lead, cols // 16)).astype(E4M3)
        factor = 0.0013
        given = np.full(() if scalar else (1,), factor if modelopt else 1 / factor, np.float32)
        multiplier = given if modelopt else np.reciprocal(given).reshape(given.shape)
        wide = np.repeat(scales.astype(np.float32), 16, -1)
        values = _unpacked(octets) * wide * multiplier.reshape(-1)[0]
        stored = (octets, scales, given, np.array([3.0], np.float32))
        names = (f"{base}.{name}" for name in (MODELOPT if modelopt else COMPRESSED))
        arrays: Tensors = {
            "": octets.view(np.uint32),
            ".scale": scales.view(np.uint8),
            ".global_scale": multiplier,
        }
        tensors: Tensors = dict(zip(names, stored, strict=True))
        return Stored(f"{base}.weight", tensors, values, "nvfp4", 16, arrays)

    return Kind(make)


def gpt_oss() -> Kind:
    """Return gpt-oss's MXFP4: `2 ** (scale - 127)` scales each block of 16 bytes, a dimension."""

    def make(base: str, shape: tuple[int, ...]) -> Stored:
        generator = _random(base, "gpt-oss")
        *lead, cols = shape
        blocks = generator.integers(256, size=(*lead, cols // 32, 16), dtype=np.uint8)
        scales = generator.integers(110, 126, size=(*lead, cols // 32), dtype=np.uint8)
        exponents = scales.astype(np.int32)[..., None] - 127
        values = np.ldexp(_unpacked(blocks), exponents).astype(np.float32).reshape(shape)
        words = blocks.reshape(*lead, cols // 2).view(np.uint32)
        tensors = {f"{base}_blocks": blocks, f"{base}_scales": scales}
        return Stored(f"{base}.weight", tensors, values, "mxfp4", 32, {"": words, ".scale": scales})

    return Kind(make, {"quantization_config": {"quant_method": "mxfp4"}})


def block_fp8(suffix: str = "_scale_inv", dtype: Any = np.float32) -> Kind:
    """Return E4M3 weights with a scale for each 128 rows and columns; values rounded to BF16."""

    def make(base: str, shape: tuple[int, ...]) -> Stored:
        generator = _random(base, "fp8")
        *lead, rows, cols = shape
        codes = _finite_octets(generator, shape, 8).view(E4M3)
        blocks = (*lead, -(-rows // 128), -(-cols // 128))
        scales = generator.uniform(1e-4, 1e-2, size=blocks).astype(dtype)
        wide = np.repeat(np.repeat(scales.astype(np.float32), 128, -2), 128, -1)[..., :rows, :cols]
        values = (codes.astype(np.float32) * wide).astype(BF16).astype(np.float32)
        name = f"{base}.weight"
        of_activations = {f"{base}.input_scale": np.array(0.5, np.float32)}
        tensors = {name: codes, name + suffix: scales, **of_activations}
        return Stored(name, tensors, values, "mxfp8", 32, {})

    return Kind(make, FP8_CONFIG)


COPIED = {
    "mlx int4/32 float16": mlx_affine(4, 32, np.float16),
    "mlx int4/64 bfloat16": mlx_affine(4, 64),
    "mlx int8/128 float32": mlx_affine(8, 128, np.float32),
    **{f"mlx {mode}": mlx_float(mode) for mode in GROUPS},
    "compressed-tensors": nvfp4(modelopt=False, scalar=False),
    "modelopt": nvfp4(modelopt=True),
    "gpt-oss": gpt_oss(),
}
DECODED = {"fp8 _scale_inv": block_fp8(), "fp8 _scale bfloat16": block_fp8("_scale", BF16)}
