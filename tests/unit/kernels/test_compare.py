"""Every native target compares weights to the bits of the NumPy twin, and the sums are right."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.weights import (
    BF16,
    DTYPES,
    EVERY,
    F32,
    FP,
    KERNELS,
    TARGETS,
    TWIN,
    edge_weights,
    every_16_bit_value,
    random_weights,
)

from blobstore import kernels
from blobstore.errors import UsageError
from blobstore.formats.quant import Quantization, QuantType
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]
Stored = QuantizedArray[Array]

F64 = np.dtype(np.float64)
FLOATS = [*DTYPES, F64]
# More and fewer than whole rows of eight lanes, and than a block of 1024.
COUNTS = (0, 1, 5, 8, 11, 1023, 1024, 1025, 2049)

any_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def compared_alike(weights: Array, read: Array | Stored) -> kernels.Comparison:
    """Fail unless all targets find the bits that the twin finds, and return those."""
    expected = kernels.compare(weights, read, kernel=TWIN)
    for name, kernel in TARGETS.items():
        found = kernels.compare(weights, read, kernel=kernel)
        np.testing.assert_array_equal(found, expected, err_msg=f"{name} {weights.dtype}")
    return expected


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_of_any_type_and_number(dtype: np.dtype[Any]) -> None:
    values = np.clip(random_weights(F32, 5, 1000).reshape(-1), -60000, 60000)
    for count in COUNTS:
        weights = values[:count].astype(dtype)
        for read_dtype in FLOATS:
            read = (values[:count] * np.float32(1.001)).astype(read_dtype)
            found = compared_alike(weights, read)
            pairs = list(zip(weights.astype(F64).tolist(), read.astype(F64).tolist(), strict=True))
            exact = [
                math.fsum((r - w) ** 2 for w, r in pairs),
                math.fsum(w * w for w, r in pairs),
                math.fsum(r * r for w, r in pairs),
                math.fsum(w * r for w, r in pairs),
            ]
            assert found[:4] == pytest.approx(exact, rel=1e-13)
            assert found.beyond == 0


@pytest.mark.parametrize(("quant_type", "group_size"), EVERY)
def test_stored_groups_count_as_their_values(quant_type: str, group_size: int) -> None:
    weights = np.clip(random_weights(F32, 9, 5 * group_size), -60000, 60000)
    for rows, stored_as in ((0, BF16), (1, F32), (7, BF16), (9, np.dtype(np.float16))):
        values = weights[:rows].astype(stored_as)
        parts = kernels.quantize(values, quant_type, group_size=group_size)
        read = kernels.dequantize(parts).reshape(-1)
        for dtype in FLOATS:
            kept = weights[:rows].astype(dtype).reshape(-1)
            assert compared_alike(kept, parts)[:5] == kernels.compare(kept, read)[:5]
    for dtype in DTYPES:
        edges = edge_weights(dtype)
        parts = kernels.quantize(edges, quant_type, group_size=group_size)
        compared_alike(edges.reshape(-1), parts)
        compared_alike(-edges.reshape(-1), parts)


@pytest.mark.parametrize("quant_type", ["int4", "int8"])
def test_scales_and_biases_of_any_bits(quant_type: str) -> None:
    kind, generator = QuantType(quant_type), np.random.default_rng(0)
    words = generator.integers(0, 2**32, (32, 256 * kind.bits), dtype=np.uint32)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        scales = every_16_bit_value(BF16).reshape(256, 256)[::8]
    biases = np.ascontiguousarray(scales[::-1])
    parts: Stored = QuantizedArray(words, scales, biases, None, Quantization(kind, 32))
    weights = generator.integers(0, 2**16, 32 * 256 * 32, dtype=np.uint16).view(BF16)
    compared_alike(weights, parts)
    for row in range(0, 16, 3):  # rows of finite values, so that no NaN hides a sum
        one = kernels.block_of(parts, slice(row, row + 1), slice(0, 256 * 32))
        compared_alike(random_weights(BF16, 256 * 32), one)


@pytest.mark.parametrize(("quant_type", "group_size"), FP)
def test_every_fp_scale_and_code(quant_type: str, group_size: int) -> None:
    octets = np.arange(256, dtype=np.uint8)
    quantization = Quantization(QuantType(quant_type), group_size)
    cols = 256 * 8 // quantization.quant_type.bits
    weights = np.tile(np.array([0.0, -0.0, 6.9, -7, 7, 464, -463, 1e-40]), cols // 8)
    factors = (0.7, -0.0, 1e30, 1e-44) if quant_type == "nvfp4" else ()
    for factor in (None, *(np.array([value], np.float32) for value in factors)):
        for octet in octets[:: 1 if factor is None else 37].tolist():
            scales = np.full((1, cols // group_size), octet, np.uint8)
            words = octets.view(np.uint32)[None]
            parts: Stored = QuantizedArray(words, scales, None, factor, quantization)
            compared_alike(weights.astype(BF16), parts)


@any_kernel
def test_sums_computed_by_hand(kernel: kernels.Kernel) -> None:
    for dtype in FLOATS:
        weights = np.array([1, -2, 3, 0, 0.5, 4, -1, 2, 10], dtype)
        read = np.array([1, -1, 3, 0.5, -0.5, 4, 1, 2, 7], dtype)
        found = kernels.compare(weights, read, kernel=kernel)
        assert tuple(found) == (15.25, 135.25, 81.5, 100.75, 3, 0)


@any_kernel
def test_each_value_is_added_to_the_lane_of_its_place_and_the_lanes_in_pairs(
    kernel: kernels.Kernel,
) -> None:
    # 2^53 + 1 is 2^53: a small product is lost in the lane of a large one, and only there.
    weights, ones = np.ones(24), np.ones(24)
    weights[3], weights[19] = 2.0**53, -(2.0**53)
    assert kernels.compare(weights, ones, kernel=kernel).product == 21  # 1 at 11 is lost
    weights[19], weights[18] = 1, -(2.0**53)
    # Lane 3 is 2^53, lane 2 is -2^53 + 2; their sum is 2, and 18 products are in the others.
    assert kernels.compare(weights, ones, kernel=kernel).product == 20


@any_kernel
def test_weights_half_a_step_beyond_the_codes_count(kernel: kernels.Kernel) -> None:
    # Codes 0 to 15 of scale 2 stand for 10 to 40: beyond are 9 and less, 41 and more.
    for dtype in FLOATS:
        weights = np.full(32, 20, dtype)
        weights[:6] = [9, 9.5, 8, 41, 40.5, 42]
        for scale, bias in ((2, 10), (-2, 40)):
            scales, biases = np.array([scale], BF16), np.array([bias], BF16)
            quantization = Quantization(QuantType.INT4, 32)
            parts = QuantizedArray(np.zeros(4, np.uint32), scales, biases, None, quantization)
            assert kernels.compare(weights, parts, kernel=kernel).beyond == 4
            still = replace(parts, scale=np.zeros(1, BF16))
            assert kernels.compare(weights, still, kernel=kernel).beyond == 0


@any_kernel
@pytest.mark.parametrize(
    ("quant_type", "one", "weights", "beyond"),
    [
        ("nvfp4", 56, [7, -7, 6.75, -0.0, 100], 3),
        ("mxfp4", 127, [7, -7, 6.75, -0.0, 100], 3),
        ("mxfp4", 0, [7, -7, 6.75, -0.0, 100], 4),
        ("mxfp8", 127, [463.9, 464, -464, 500], 3),
    ],
)
def test_weights_beyond_the_largest_small_float_count(
    quant_type: str, one: int, weights: list[float], beyond: int, kernel: kernels.Kernel
) -> None:
    kind = kernels.quantization_of(quant_type)
    values = np.resize(np.array([*weights, *[0.0] * 32], F32), 32)
    scales = np.full(32 // kind.group_size, one, np.uint8)
    words = np.zeros(kind.quant_type.bits, np.uint32)
    parts: Stored = QuantizedArray(words, scales, None, None, kind)
    assert kernels.compare(values, parts, kernel=kernel).beyond == beyond


@any_kernel
def test_a_value_that_is_not_finite_shows_in_its_sum(kernel: kernels.Kernel) -> None:
    for dtype in FLOATS:
        for odd, place in ((np.inf, 0), (-np.inf, 7), (np.nan, 8), (np.nan, 16)):
            values, ones = np.ones(17, dtype), np.ones(17, dtype)
            values[place] = odd
            assert not math.isfinite(kernels.compare(values, ones, kernel=kernel).squared_weight)
            assert not math.isfinite(kernels.compare(ones, values, kernel=kernel).squared_read)
            largest = kernels.compare(values, ones, kernel=kernel).max_error
            assert largest == (0 if math.isnan(odd) else math.inf)


def test_any_layout_and_any_real_type_is_compared() -> None:
    weights = np.arange(-40, 40, dtype=np.int16)
    expected = kernels.compare(weights.astype(F64), weights.astype(F64) + 1)
    shifted = np.frombuffer(b"x" + (weights + 1).astype(F32).tobytes(), F32, offset=1)
    assert not shifted.flags.aligned
    assert kernels.compare(weights, shifted) == expected
    assert kernels.compare(weights.reshape(8, 10), (weights + 1).astype(">f8")) == expected
    assert kernels.compare(np.repeat(weights, 2)[::2], weights + 1) == expected


def test_different_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"1,024 weights are not read back as 1,025 values"):
        kernels.compare(np.zeros(1024, F32), np.zeros(1025, F32))
    parts = kernels.quantize(np.zeros((1, 64), F32), "int4")
    with pytest.raises(UsageError, match="32 weights are not read back as 64 values"):
        kernels.compare(np.zeros(32, F32), parts)
