"""Groups and words computed by hand: every kernel gives these parts and values."""

from typing import Any

import numpy as np
import pytest
from support.weights import BF16, F32, KERNELS

from blobstore import kernels
from blobstore.formats.dtypes import Quantization, QuantType
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]

INT4_32 = Quantization(QuantType.INT4, 32)

any_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


@any_kernel
def test_affine_groups_at_the_end_of_float32(kernel: kernels.Kernel) -> None:
    for dtype in (BF16, F32):
        constant = np.full((1, 32), -1e32, dtype)
        quantized = kernels.quantize(constant, "int4", kernel=kernel)
        assert quantized.scale.tolist() == [[0]]
        assert np.signbit(quantized.scale).tolist() == [[True]]
        values = kernels.dequantize(quantized, kernel=kernel)
        np.testing.assert_array_equal(values, constant.astype(np.float32))
        wide = np.resize(np.array([3e38, -2e38], dtype), (1, 32))
        quantized = kernels.quantize(wide, "int4", kernel=kernel)
        assert quantized.scale.tolist() == [[-np.inf]]
        assert not np.isfinite(kernels.dequantize(quantized, kernel=kernel)).any()


@any_kernel
def test_the_product_is_rounded_before_the_bias_is_added(kernel: kernels.Kernel) -> None:
    scale = np.float32(1 + 2.0**-23)
    words = np.full((1, 4), 0xBBBBBBBB, np.uint32)
    parts = np.array([[scale]]), np.array([[-11]], np.float32)
    quantized = QuantizedArray(words, *parts, None, INT4_32)
    assert set(kernels.dequantize(quantized, kernel=kernel).ravel().tolist()) == {2.0**-20}
    assert float(scale) * 11 - 11 == 11 * 2.0**-23
