"""Every native target compares weights to the bits of the NumPy twin, and the sums are right."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.weights import BF16, DTYPES, EVERY, F16, F32, KERNELS, TWIN, random_weights

from blobstore import kernels
from blobstore.formats.dtypes import Quantization, QuantType
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]
Stored = QuantizedArray[Array]

F64 = np.dtype(np.float64)
FLOATS = [*DTYPES, F64]
# More and fewer than whole rows of eight lanes, and than a block of 1024.
COUNTS = (0, 1, 8, 11, 1023, 1025, 2049)

any_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


@any_kernel
def test_floats_of_any_type_and_number(kernel: kernels.Kernel) -> None:
    values = np.clip(random_weights(F32, 5, 1000).reshape(-1), -60000, 60000)
    for dtype, count in product(FLOATS, COUNTS):
        weights = values[:count].astype(dtype)
        for read_dtype in FLOATS:
            read = (values[:count] * np.float32(1.001)).astype(read_dtype)
            found = kernels.compare(weights, read, kernel=kernel)
            assert found == kernels.compare(weights, read, kernel=TWIN)
            wide, wide_read = weights.astype(F64), read.astype(F64)
            pairs = [(wide_read - wide, wide_read - wide), (wide, wide)]
            pairs += [(wide_read, wide_read), (wide, wide_read)]
            exact = [math.fsum((left * right).tolist()) for left, right in pairs]
            assert found[:4] == pytest.approx(exact, rel=1e-13)
            assert found.beyond == 0


@pytest.mark.parametrize(("quant_type", "group_size"), EVERY)
def test_stored_groups_count_as_their_values(quant_type: str, group_size: int) -> None:
    weights = np.clip(random_weights(F32, 9, 5 * group_size), -60000, 60000)
    for rows, stored_as in ((0, BF16), (1, F32), (7, BF16), (9, F16)):
        values = weights[:rows].astype(stored_as)
        parts = kernels.quantize(values, quant_type, group_size=group_size)
        read = kernels.dequantize(parts).reshape(-1)
        for dtype in FLOATS:
            kept = weights[:rows].astype(dtype).reshape(-1)
            assert kernels.compare(kept, parts)[:5] == kernels.compare(kept, read)[:5]


@any_kernel
def test_weights_half_a_step_beyond_the_codes_count(kernel: kernels.Kernel) -> None:
    # Codes 0 to 15 of scale 2 stand for 10 to 40: beyond are 9 and less, 41 and more.
    for dtype in FLOATS:
        weights = np.full(32, 20, dtype)
        weights[:6] = [9, 9.5, 8, 41, 40.5, 42]
        for scale, bias, beyond in ((2, 10, 4), (-2, 40, 4), (0, 10, 0)):
            scales, biases = np.array([scale], BF16), np.array([bias], BF16)
            quantization = Quantization(QuantType.INT4, 32)
            parts = QuantizedArray(np.zeros(4, np.uint32), scales, biases, None, quantization)
            assert kernels.compare(weights, parts, kernel=kernel).beyond == beyond


@any_kernel
def test_weights_beyond_the_largest_small_float_count(kernel: kernels.Kernel) -> None:
    for quant_type, one, weights, beyond in (
        ("nvfp4", 56, [7, -7, 6.75, -0.0, 100], 3),
        ("mxfp4", 127, [7, -7, 6.75, -0.0, 100], 3),
        ("mxfp4", 0, [7, -7, 6.75, -0.0, 100], 4),
        ("mxfp8", 127, [463.9, 464, -464, 500], 3),
    ):
        kind = kernels.quantization_of(quant_type)
        values = np.array([*weights, *[0] * (32 - len(weights))], F32)
        words = np.zeros(kind.quant_type.bits, np.uint32)
        scales = np.full(32 // kind.group_size, one, np.uint8)
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
