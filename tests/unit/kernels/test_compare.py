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
    F16,
    F32,
    FP,
    TARGETS,
    TWIN,
    edge_weights,
    every_16_bit_value,
    random_weights,
)

from blobstore import kernels
from blobstore.errors import UsageError
from blobstore.formats.quant import Quantization, QuantType
from blobstore.kernels import _native
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]
Stored = QuantizedArray[Array]

F64 = np.dtype(np.float64)
FLOATS = [*DTYPES, F64]
# More and fewer than whole rows of eight lanes, and than a block of 1024.
COUNTS = (*range(20), 1023, 1024, 1025, 4099)

any_form = pytest.mark.parametrize(("quant_type", "group_size"), EVERY)
any_weights = pytest.mark.parametrize("dtype", FLOATS, ids=str)
any_kernel = pytest.mark.parametrize(
    "kernel", [*TARGETS.values(), TWIN], ids=lambda kernel: kernel.name
)


def assert_targets_compare_as_twin(
    weights: Array, read: Array | QuantizedArray[Array], what: str = ""
) -> kernels.Comparison:
    """Fail unless all targets find the bits that the twin finds, and return those."""
    expected = kernels.compare(weights, read, kernel=TWIN)
    for name, kernel in TARGETS.items():
        found = kernels.compare(weights, read, kernel=kernel)
        np.testing.assert_array_equal(found, expected, err_msg=f"{name} {weights.dtype} {what}")
    return expected


def exact_sums(weights: Array, read: Array) -> list[float]:
    """Return the first four sums, rounded once at the end."""
    pairs = list(zip(weights.astype(F64).tolist(), read.astype(F64).tolist(), strict=True))
    return [
        math.fsum((r - w) ** 2 for w, r in pairs),
        math.fsum(w * w for w, r in pairs),
        math.fsum(r * r for w, r in pairs),
        math.fsum(w * r for w, r in pairs),
    ]


@any_weights
@pytest.mark.parametrize("read_dtype", FLOATS, ids=str)
def test_targets_equal_twin_for_floats(dtype: np.dtype[Any], read_dtype: np.dtype[Any]) -> None:
    limit = 60000
    weights = np.clip(random_weights(F32, 5, 1000).reshape(-1), -limit, limit)
    for count in COUNTS:
        kept = weights[:count].astype(dtype)
        back = (weights[:count] * np.float32(1.001)).astype(read_dtype)
        found = assert_targets_compare_as_twin(kept, back, f"{count} of {read_dtype}")
        assert found[:4] == pytest.approx(exact_sums(kept, back), rel=1e-13)
        assert found.beyond == 0


@any_weights
@any_form
def test_targets_equal_twin_for_stored_groups(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    weights = random_weights(F16 if dtype == F16 else F32, 9, 5 * group_size)
    for rows in (0, 1, 2, 7, 9):
        kept = weights[:rows].astype(dtype)
        for stored_as in DTYPES:
            with np.errstate(over="ignore"):
                parts = kernels.quantize(
                    np.clip(weights[:rows], -60000, 60000).astype(stored_as),
                    quant_type,
                    group_size=group_size,
                )
            found = assert_targets_compare_as_twin(kept.reshape(-1), parts, f"{rows} {stored_as}")
            read = kernels.dequantize(parts).reshape(-1)
            assert found[:5] == kernels.compare(kept.reshape(-1), read)[:5]


@any_form
def test_targets_equal_twin_beyond_a_block(quant_type: str, group_size: int) -> None:
    weights = random_weights(BF16, 3, 1152)
    parts = kernels.quantize(weights, quant_type, group_size=group_size)
    found = assert_targets_compare_as_twin(weights.reshape(-1), parts)
    doubled = np.ldexp(weights.astype(F32), 1).astype(BF16)  # every group is saturated somewhere
    assert assert_targets_compare_as_twin(doubled.reshape(-1), parts).beyond > found.beyond


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@any_form
def test_targets_equal_twin_on_edge_groups(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    weights = edge_weights(dtype)
    parts = kernels.quantize(weights, quant_type, group_size=group_size)
    assert_targets_compare_as_twin(weights.reshape(-1), parts)
    assert_targets_compare_as_twin(-weights.reshape(-1), parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quant_type", ["int4", "int8"])
def test_targets_equal_twin_for_every_scale_and_bias(quant_type: str, dtype: np.dtype[Any]) -> None:
    every = every_16_bit_value(dtype if dtype in (BF16, F16) else BF16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        scales = every.reshape(256, 256).astype(dtype)
    kind = QuantType(quant_type)
    generator = np.random.default_rng(0)
    words = generator.integers(0, 2**32, (256, 256 * kind.bits), dtype=np.uint32)
    parts = QuantizedArray(
        words, scales, np.ascontiguousarray(scales[::-1]), None, Quantization(kind, 32)
    )
    weights = generator.integers(0, 2**16, 256 * 256 * 32, dtype=np.uint16).view(BF16)
    assert_targets_compare_as_twin(weights, parts)
    for row in range(0, 128, 17):  # rows of finite values, so that no NaN hides a sum
        one = kernels.block_of(parts, slice(row, row + 1), slice(0, 256 * 32))
        assert_targets_compare_as_twin(random_weights(BF16, 256 * 32), one, f"row {row}")


@pytest.mark.parametrize("global_scale", [None, 0.7, -0.7, -0.0, 1e30, 1e-44])
@pytest.mark.parametrize(("quant_type", "group_size"), FP)
def test_targets_equal_twin_for_every_fp_scale_and_code(
    quant_type: str, group_size: int, global_scale: float | None
) -> None:
    octets = np.arange(256, dtype=np.uint8)
    quantization = Quantization(QuantType(quant_type), group_size)
    cols = 256 * 8 // quantization.quant_type.bits
    words = octets.view(np.uint32)[None]
    double = global_scale is not None and quant_type == "nvfp4"
    factor = np.array([global_scale], np.float32) if double else None
    for octet in octets.tolist():
        scales = np.full((1, cols // group_size), octet, np.uint8)
        parts: Stored = QuantizedArray(words, scales, None, factor, quantization)
        for dtype in (BF16, F64):
            weights = np.tile(np.array([0.0, -0.0, 6.9, -7, 7, 464, -463, 1e-40]), cols // 8)
            assert_targets_compare_as_twin(weights.astype(dtype), parts, f"scale {octet}")


@any_kernel
@any_weights
def test_sums_computed_by_hand(dtype: np.dtype[Any], kernel: kernels.Kernel) -> None:
    weights = np.array([1, -2, 3, 0, 0.5, 4, -1, 2, 10], dtype)
    read = np.array([1, -1, 3, 0.5, -0.5, 4, 1, 2, 7], dtype)
    found = kernels.compare(weights, read, kernel=kernel)
    assert tuple(found) == (15.25, 135.25, 81.5, 100.75, 3, 0)
    turned = kernels.compare(read, weights, kernel=kernel)
    assert tuple(turned) == (15.25, 81.5, 135.25, 100.75, 3, 0)


@any_kernel
def test_each_value_is_added_to_the_lane_of_its_place_and_the_lanes_in_pairs(
    kernel: kernels.Kernel,
) -> None:
    # 2^53 + 1 is 2^53: a small product is lost in the lane of a large one, and only there.
    weights = np.ones(24)
    weights[3], weights[19] = 2.0**53, -(2.0**53)
    ones = np.ones(24)
    assert kernels.compare(weights, ones, kernel=kernel).product == 21  # 1 at 11 is lost
    weights[19], weights[18] = 1, -(2.0**53)
    # Lane 3 is 2^53, lane 2 is -2^53 + 2; their sum is 2, and 18 products are in the others.
    assert kernels.compare(weights, ones, kernel=kernel).product == 20


@any_kernel
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_weights_half_a_step_beyond_the_codes_count(
    dtype: np.dtype[Any], kernel: kernels.Kernel
) -> None:
    # Codes 0 to 15 of scale 2 stand for 10 to 40: beyond are 9 and less, 41 and more.
    weights = np.full(32, 20, dtype)
    weights[:6] = [9, 9.5, 8, 41, 40.5, 42]
    words = np.zeros(4, np.uint32)
    for scale, bias in ((2, 10), (-2, 40)):
        parts = QuantizedArray(
            words,
            np.array([scale], BF16),
            np.array([bias], BF16),
            None,
            Quantization(QuantType.INT4, 32),
        )
        assert kernels.compare(weights, parts, kernel=kernel).beyond == 4
        flat = replace(parts, scale=np.zeros(1, BF16))
        assert kernels.compare(weights, flat, kernel=kernel).beyond == 0


@any_kernel
@pytest.mark.parametrize(("quant_type", "one", "end"), [("nvfp4", 56, 7), ("mxfp4", 127, 7)])
def test_weights_beyond_the_largest_small_float_count(
    quant_type: str, one: int, end: float, kernel: kernels.Kernel
) -> None:
    kind = Quantization(QuantType(quant_type), 16 if quant_type == "nvfp4" else 32)
    weights = np.zeros(32, F32)
    weights[:5] = [end, -end, 6.75, -0.0, 100]
    for scale, beyond in ((one, 3), (0, 4)):
        scales = np.full(32 // kind.group_size, scale, np.uint8)
        parts: Stored = QuantizedArray(np.zeros(4, np.uint32), scales, None, None, kind)
        assert kernels.compare(weights, parts, kernel=kernel).beyond == beyond


@any_kernel
def test_beyond_the_largest_e4m3_are_464_and_more(kernel: kernels.Kernel) -> None:
    weights = np.zeros(32, F32)
    weights[:4] = [463.9, 464, -464, 500]
    kind = Quantization(QuantType.MXFP8, 32)
    words, scales = np.zeros(8, np.uint32), np.array([127], np.uint8)
    parts: Stored = QuantizedArray(words, scales, None, None, kind)
    assert kernels.compare(weights, parts, kernel=kernel).beyond == 3


@any_kernel
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_value_that_is_not_finite_shows_in_its_sum(
    dtype: np.dtype[Any], odd: float, kernel: kernels.Kernel
) -> None:
    for place in (0, 7, 8, 16):
        values = np.ones(17, dtype)
        values[place] = odd
        ones = np.ones(17, dtype)
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


U16 = np.uint16
FLOAT_CASE: dict[str, Any] = {
    "target": "plain",
    "float_type": "BF16",
    "read_type": "F64",
    "weights": np.zeros(64, U16),
    "read": np.zeros(64, np.uint64),
}
STORED_CASE: dict[str, Any] = {
    "target": "plain",
    "float_type": "BF16",
    "quant_type": "int4",
    "scale_type": "F16",
    "weights": np.zeros(64, U16),
    "words": np.zeros(8, np.uint32),
    "scales": np.zeros(2, U16),
    "biases": np.zeros(2, U16),
    "group_size": 32,
    "global_scale": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "reference"}, "unknown target"),
        ({"float_type": "F8"}, "unknown name"),
        ({"read_type": "I32"}, "unknown name"),
        ({"float_type": "F32"}, "weights"),
        ({"read_type": "F32"}, "read"),
        ({"read": np.zeros(63, np.uint64)}, "read"),
    ],
)
def test_native_refuses_floats_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    _native.compare(**FLOAT_CASE)
    with pytest.raises(ValueError, match=message):
        _native.compare(**{**FLOAT_CASE, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "reference"}, "unknown target"),
        ({"float_type": "F32"}, "weights"),
        ({"scale_type": "F64"}, "unknown name"),
        ({"scale_type": "F32"}, "scales"),
        ({"quant_type": "int8"}, "words"),
        ({"quant_type": "mxfp4", "biases": None}, "scales"),
        ({"weights": np.zeros(65, U16)}, "whole number of groups"),
        ({"words": np.zeros(7, np.uint32)}, "words"),
        ({"scales": np.zeros(1, U16)}, "scales"),
        ({"biases": None}, "biases"),
        ({"biases": np.zeros(3, U16)}, "biases"),
        ({"group_size": 16}, "group_size"),
        ({"group_size": 0}, "group_size"),
    ],
)
def test_native_refuses_groups_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    _native.compare_stored(**STORED_CASE)
    with pytest.raises(ValueError, match=message):
        _native.compare_stored(**{**STORED_CASE, **changes})
