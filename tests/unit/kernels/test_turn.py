"""Packed codes of other programs become ours: rows of outputs, of 4 or 8 bits, or values."""

from typing import Any

import numpy as np
import pytest
from support.weights import DTYPES, KERNELS, raw

from blobstore import kernels
from blobstore.kernels import _native

Array = np.ndarray[Any, Any]

any_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
# One word, less and more than a tile of 16 words a row, and squares that are cut.
SHAPES = [(1, 1), (5, 3), (16, 4), (17, 33), (128, 2), (131, 5), (1024, 16)]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The code of an output by its place in a word, as AutoAWQ packs them."""


def codes_of(words: Array) -> Array:
    return words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)


@any_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_are_those_of_their_outputs(kernel: kernels.Kernel, shape: tuple[int, int]) -> None:
    words = np.random.default_rng(shape).integers(0, 2**32, shape, dtype=np.uint32)
    np.testing.assert_array_equal(kernel.turn(words, 1), words.T)
    inputs, width = shape
    codes = codes_of(words)
    by_output = np.zeros((width, 8, -(-inputs // 8) * 8), np.uint32)
    by_output[:, AWQ_ORDER, :inputs] = codes.transpose(1, 2, 0)
    turned = codes_of(kernel.turn(words, 8))
    np.testing.assert_array_equal(turned.reshape(by_output.shape), by_output)


@any_kernel
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_any_width_get_four_or_eight_bits(kernel: kernels.Kernel, bits: int) -> None:
    words = np.random.default_rng(bits).integers(0, 2**32, (3, 37), dtype=np.uint32)
    for used in {32, 32 - 32 % bits}:
        numbers = [sum(int(w) % 2**used << used * i for i, w in enumerate(row)) for row in words]
        for wide in (4, 8) if bits <= 4 else (8,):
            for size in (1, 20, 400):  # fewer and more than there are
                codes = range(size * 32 // wide)
                expected = [[number >> bits * i & 2**bits - 1 for i in codes] for number in numbers]
                widened = kernel.widen(words, bits, used, wide, size).view(np.uint8)
                found = widened if wide == 8 else np.stack((widened & 15, widened >> 4), -1)
                np.testing.assert_array_equal(found.reshape(len(words), -1), expected)


@any_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_in_any_groups(kernel: kernels.Kernel, dtype: Any) -> None:
    random = np.random.default_rng(7)
    codes = random.integers(0, 256, (5, 44), dtype=np.uint8)
    groups = random.integers(0, 3, 41).astype(np.int32)
    scales = (random.standard_normal((5, 3)) * 0.01).astype(np.float32)
    zeros = random.integers(0, 256, (5, 3)).astype(np.float32)
    scale, zero, code = scales[:, groups], zeros[:, groups], codes[:, :41].astype(np.float32)
    for by_zero, expected in ((True, (code - zero) * scale), (False, code * scale + zero)):
        out = np.empty(5 * 41, dtype)
        kernel.dequantize_columns(codes, groups, scales, zeros, out, by_zero=by_zero)
        np.testing.assert_array_equal(raw(out), raw(expected.astype(dtype).reshape(-1)))


def test_arguments_that_do_not_fit_are_refused() -> None:
    words, codes = np.zeros((2, 3), np.uint32), np.zeros((2, 4), np.uint8)
    layouts = (9, 32, 8), (5, 32, 4), (0, 32, 8), (3, 33, 8), (8, 24, 8), (2, 32, 2)
    for bits, used, wide in layouts:
        with pytest.raises(ValueError, match=r"layout|bits"):
            _native.widen(words, bits, used, wide, np.zeros((2, 1), np.uint32))
    scales, out = np.zeros((2, 3), np.float32), np.zeros(8, np.float32).view(np.uint32)
    for group, rows, cols in ((3, 2, 4), (-1, 2, 4), (0, 1, 4), (0, 2, 5), (0, 2, 3)):
        groups = np.full(cols, group, np.int32)
        given = codes, groups, scales[:rows], scales[:rows]
        with pytest.raises(ValueError, match=r"group|size"):
            _native.dequantize_columns("plain", "F32", *given, True, out)
    lines = np.zeros((9, 3), np.uint32)
    for square, shape in ((1, (3, 8)), (1, (9, 3)), (8, (24, 1)), (8, (3, 2)), (4, (12, 3))):
        with pytest.raises(ValueError, match=r"rows|turned"):
            _native.turn(lines, square, np.zeros(shape, np.uint32))
