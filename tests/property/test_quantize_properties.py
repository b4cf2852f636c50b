"""For any finite float32 groups the error of a quantized value is bounded.

For any bits at all every target equals the twin.

The bounds are those of FORMAT.md section 3's arithmetic, plus what rounding to float32 adds; none
depends on the kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from support.weights import DTYPES, TARGETS, TWIN, parts_of, raw_or_nan

from blobstore import kernels
from blobstore.errors import NonFiniteWeightError
from blobstore.formats.quant import QuantType
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]

AFFINE = ("int4", "int8")
FP = ("nvfp4", "mxfp4", "mxfp8")
EPSILON = 2.0**-23


def weights_of(cols: int, limit: float) -> st.SearchStrategy[Array]:
    """Float32 ``[1 or 2, cols]``: any values, or values of one scale around an offset."""
    shapes = st.tuples(st.integers(1, 2), st.just(cols))
    limit = float(np.float32(limit))
    finite = st.floats(-limit, limit, width=32)
    anything = arrays(np.float32, shapes, elements=finite, fill=finite)
    seeds = st.integers(0, 2**32 - 1)
    scales = st.sampled_from([1e-9, 1e-7, 1e-6, 0.02, 1, 3e4])
    offsets = st.sampled_from([0, 0, 1, -1, 1000])

    def alike(shape: tuple[int, int], seed: int, scale: float, offset: float) -> Array:
        units = np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)
        values: Array = (units + np.float32(offset)) * np.float32(scale)
        return values.clip(-np.float32(limit), np.float32(limit))

    return anything | st.builds(alike, shapes, seeds, scales, offsets)


def values_of(values: Array) -> bytes:
    """Return the bytes of float values, one pattern for all NaNs."""
    return raw_or_nan(values).tobytes()


def outcome(
    weights: Array, quant_type: str, group_size: int, method: str, kernel: kernels.Kernel
) -> object:
    """Return the bytes of the parts and the values, or the index of the refused weight."""
    with np.errstate(all="ignore"):
        try:
            quantized = kernels.quantize(
                weights, quant_type, group_size=group_size, method=method, kernel=kernel
            )
        except NonFiniteWeightError as error:
            return error.index
        values = kernels.dequantize(quantized, kernel=kernel)
    return [part.tobytes() for part in parts_of(quantized)], values_of(values)


def beside_others(groups: Array, place: int) -> Array:
    """Return 27 groups, the drawn ones at ``place`` and after.

    They are lanes of a block of 16 or 8, or single ones at the end.
    """
    others = np.random.default_rng(27).standard_normal((27, groups.shape[1])).astype(np.float32)
    weights = others.astype(groups.dtype)
    weights[place : place + len(groups)] = groups
    return weights


@settings(max_examples=50)
@given(data=st.data())
def test_affine_errors_are_half_a_step_or_what_falls_short_of_the_range(
    data: st.DataObject,
) -> None:
    quant_type = data.draw(st.sampled_from(AFFINE))
    group_size = data.draw(st.sampled_from(QuantType(quant_type).group_sizes))
    weights = data.draw(weights_of(group_size, 1e38))
    quantized = kernels.quantize(weights, quant_type, group_size=group_size)
    groups = weights.astype(np.float64)
    step = np.abs(quantized.scale.astype(np.float64))
    reached = (2**quantized.quant_type.bits - 1) * step
    shortfall = groups.max(axis=1, keepdims=True) - groups.min(axis=1, keepdims=True) - reached
    rounding = 4 * EPSILON * (reached + np.abs(groups).max(axis=1, keepdims=True))
    error = np.abs(kernels.dequantize(quantized) - groups)
    assert (error <= np.maximum(step / 2, shortfall) + rounding).all()
    assert (error <= step + rounding).all()


@settings(max_examples=50)
@given(data=st.data())
def test_mx_errors_are_half_the_distance_between_codes(data: st.DataObject) -> None:
    quant_type = data.draw(st.sampled_from(["mxfp4", "mxfp8"]))
    weights = data.draw(weights_of(32, 3.4 * 2.0**126))
    quantized = kernels.quantize(weights, quant_type)
    mantissa_bits, smallest = (3, 2.0**-9) if quant_type == "mxfp8" else (1, 0.5)
    scale = np.ldexp(1.0, quantized.scale.astype(np.int32) - 127)
    exact = weights.astype(np.float64)
    bound = np.maximum(np.abs(exact) * 2.0 ** -(mantissa_bits + 1), scale * smallest / 2) * (
        1 + 2 * EPSILON
    )
    assert (np.abs(kernels.dequantize(quantized) - exact) <= bound + 2.0**-149).all()
    largest = np.abs(exact).max(axis=1, keepdims=True) / (448 if quant_type == "mxfp8" else 6)
    assert (largest <= scale * (1 + EPSILON)).all()
    assert ((scale < 2 * largest * (1 + EPSILON)) | (quantized.scale == 0)).all()


any_type = st.sampled_from(AFFINE + FP)


def bits(data: st.DataObject, dtype: Any, count: int) -> Array:
    """Draw a row of values of any bits."""
    size = count * np.dtype(dtype).itemsize
    drawn: Array = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), dtype)
    return drawn.reshape(1, -1)


@settings(max_examples=50)
@given(data=st.data())
def test_every_target_equals_twin_for_any_bits(data: st.DataObject) -> None:
    quant_type, dtype = data.draw(any_type), data.draw(st.sampled_from(DTYPES))
    group_size = data.draw(st.sampled_from(QuantType(quant_type).group_sizes))
    weights = beside_others(bits(data, dtype, group_size), data.draw(st.integers(0, 26)))
    for method in kernels.METHODS:
        expected = outcome(weights, quant_type, group_size, method, TWIN)
        for name, kernel in TARGETS.items():
            assert outcome(weights, quant_type, group_size, method, kernel) == expected, name


@settings(max_examples=50)
@given(data=st.data())
def test_every_target_dequantizes_any_bits_as_the_twin(data: st.DataObject) -> None:
    quantization = kernels.quantization_of(data.draw(any_type))
    kind = quantization.quant_type
    words = bits(data, np.uint32, quantization.group_size * kind.bits // 32)
    dtype = data.draw(st.sampled_from(DTYPES)) if kind.is_affine else np.dtype(np.uint8)
    bias = bits(data, dtype, 1) if kind.is_affine else None
    factor = bits(data, np.float32, 1)[0] if kind is QuantType.NVFP4 else None
    quantized = QuantizedArray(words, bits(data, dtype, 1), bias, factor, quantization)
    output = data.draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    with np.errstate(all="ignore"):
        expected = values_of(kernels.dequantize(quantized, output, kernel=TWIN))
        for name, kernel in TARGETS.items():
            assert values_of(kernels.dequantize(quantized, output, kernel=kernel)) == expected, name
