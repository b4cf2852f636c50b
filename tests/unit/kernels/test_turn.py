"""Words of codes that lie with inputs first become rows of outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.weights import KERNELS

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


def test_rows_of_another_size_are_refused() -> None:
    lines = np.zeros((9, 3), np.uint32)
    for square, shape in ((1, (3, 8)), (1, (9, 3)), (8, (24, 1)), (8, (3, 2)), (4, (12, 3))):
        with pytest.raises(ValueError, match=r"rows|turned"):
            _native.turn(lines, square, np.zeros(shape, np.uint32))
