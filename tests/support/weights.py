"""Weights, forms and targets for tests of a quantizer, and comparisons of its results."""

from typing import Any

import ml_dtypes
import numpy as np

from blobstore import kernels
from blobstore.kernels.arrays import QuantizedArray, map_parts

Array = np.ndarray[Any, Any]

BF16, F16, F32 = (np.dtype(kind) for kind in (ml_dtypes.bfloat16, np.float16, np.float32))
DTYPES = [BF16, F16, F32]
AFFINE = [(name, size) for name in ("int4", "int8") for size in (32, 64, 128)]
FP = [("nvfp4", 16), ("mxfp4", 32), ("mxfp8", 32)]
EVERY = AFFINE + FP
TWIN = kernels.KERNELS["reference"]
# Every native target that this build has and that runs on this machine, by name; not only the best.
TARGETS = {
    name: kernel for name, kernel in kernels.KERNELS.items() if name not in {"native", "reference"}
}
KERNELS = [*TARGETS.values(), TWIN]


def random_weights(dtype: np.dtype[Any], *shape: int, seed: tuple[int, ...] = ()) -> Array:
    """Return finite weights with row scales 1e-6 to 1e3; some rows heavy-tailed, some of ties."""
    generator = np.random.default_rng((*shape, *seed))
    values = generator.standard_normal(shape, dtype=np.float32)
    values[1::3] **= 3
    values[2::3] = np.rint(values[2::3] * 8) / 16
    scales = 10.0 ** generator.uniform(-6, 3, (*shape[:-1], 1))
    scales[2::3] = 2.0 ** generator.integers(-20, 10, scales[2::3].shape)
    values *= scales.astype(np.float32)
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(values, -limit, limit).astype(dtype)


def edge_weights(dtype: np.dtype[Any]) -> Array:
    """Return ``[rows, 128]`` weights: one corner of the number format or arithmetic a row."""
    info = ml_dtypes.finfo(dtype)
    ends_of_type = (info.max, info.smallest_normal, info.smallest_subnormal)
    largest, normal, subnormal = map(float, ends_of_type)
    generator = np.random.default_rng(128)
    noise = generator.standard_normal(128)
    whole = generator.integers(-8, 9, 128)
    one_hot = np.eye(1, 128, 5)[0]
    alternating = np.where(np.arange(128) % 2, 1.0, -1.0)
    ends = (0.0, 1.0, 3.3, 1e-7, largest, normal, subnormal)
    rows = [np.full(128, sign * value) for value in ends for sign in (1, -1)]
    rows += [sign * (by + np.abs(noise)) for by in (0, 1) for sign in (1, -1)]
    rows += [sign * (noise * 0.01 + one_hot * 50) for sign in (1, -1)]
    rows += [sign * one_hot * largest for sign in (1, -1)]
    rows += [alternating * value for value in (largest, normal, 0.0, -0.0)]
    rows += [noise * value for value in (normal, 0.2 * largest, 1e-7, 1e-9)]
    rows += [whole * value for value in (subnormal, normal, 0.5, 0.25, 1.0, 2.0**-13)]
    rows += [noise * 1e-6 + 1, noise * 1e-6 - 1, generator.integers(-127, 129, 128) * 1.0]
    rows += [np.where(noise < 0, -0.0, noise), np.where(noise > 0, 0.0, noise)]
    groups: Array = np.clip(np.array(rows), -largest, largest).astype(dtype)
    return groups


def shaped_groups(
    dtype: np.dtype[Any], groups: int, group_size: int, seed: tuple[int, ...] = ()
) -> Array:
    """Return ``[groups, group_size]`` weights, each eighth of the groups of one shape.

    Normal ones of ordinary size, of 0.02, 0.005 and 1e-4 (E4M3's subnormal scales), heavy-tailed
    ones, large ones, ties, and one weight among zeros; the shapes take turns, so that lanes that
    are searched side by side end at different times.
    """
    generator = np.random.default_rng((groups, group_size, *seed))
    values = generator.standard_normal((groups, group_size), dtype=np.float32)
    values[1::8] *= np.float32(0.02)
    values[2::8] *= np.float32(0.005)
    values[3::8] *= np.float32(1e-4)
    values[4::8] **= 3
    values[5::8] *= np.float32(2000)
    values[6::8] = np.rint(values[6::8] * 4) / 4
    values[7::8] *= np.arange(group_size) == generator.integers(
        group_size, size=(len(values[7::8]), 1)
    )
    return np.clip(values, -65504, 65504).astype(dtype)


def random_importance(cols: int, seed: int = 0) -> Array:
    """Return float32 ``[cols]`` importance over six decades, one column in seven without any."""
    generator = np.random.default_rng((cols, seed))
    importance = (10.0 ** generator.uniform(-3, 3, cols)).astype(np.float32)
    importance[generator.random(cols) < 1 / 7] = 0
    return importance


def every_16_bit_value(dtype: np.dtype[Any]) -> Array:
    """Return all 65,536 values of BF16 or F16."""
    return np.arange(2**16, dtype=np.uint16).view(dtype)


def raw(array: Array) -> Array:
    return array.view(f"u{array.dtype.itemsize}")


def flat(parts: QuantizedArray[Array]) -> QuantizedArray[Array]:
    return map_parts(parts, lambda part: part.reshape(-1))


def raw_or_nan(values: Array) -> Array:
    """Return the bits of float values, one pattern for all NaNs."""
    bits = raw(values)
    return np.where(np.isnan(values), np.iinfo(bits.dtype).max, bits)


def parts_of(quantized: QuantizedArray[Array]) -> list[Array]:
    parts = (quantized.weight, quantized.scale, quantized.bias, quantized.global_scale)
    return [part for part in parts if part is not None]


def assert_same_parts(
    left: QuantizedArray[Array], right: QuantizedArray[Array], what: str = ""
) -> None:
    """Fail unless both are quantized alike and store the same bits."""
    assert left.quantization == right.quantization, what
    for part, expected in zip(parts_of(left), parts_of(right), strict=True):
        assert part.dtype == expected.dtype, what
        np.testing.assert_array_equal(raw(part), raw(expected), err_msg=what)


def squared_errors(
    weights: Array, quantized: QuantizedArray[Array], importance: Array | None = None
) -> Array:
    """Return the squared error of every group, flat, in float64, weighed by the columns."""
    difference = kernels.dequantize(quantized).astype(np.float64) - weights.astype(np.float64)
    squared = difference**2 if importance is None else difference**2 * importance.astype(np.float64)
    total: Array = squared.reshape(-1, quantized.group_size).sum(axis=1)
    return total
