"""Groups and words computed by hand: every kernel gives these parts and values."""

from typing import Any

import numpy as np
import pytest
from support.weights import BF16, DTYPES, F32, KERNELS

from blobstore import kernels
from blobstore.formats.dtypes import Quantization, QuantType
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]

INT4_32 = Quantization(QuantType.INT4, 32)

any_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def codes_of(quantized: QuantizedArray[Array]) -> list[int]:
    """Return the codes of all words, read with shifts: the first code is in the lowest bits."""
    bits = quantized.quant_type.bits
    return [
        int(word) >> shift & (1 << bits) - 1
        for word in quantized.weight.ravel()
        for shift in range(0, 32, bits)
    ]


# The numbers after those given are 0; their codes are the last one given.
AFFINE_GROUPS: dict[str, tuple[str, list[float], float, float, list[int]]] = {
    "upper edge": ("int4", [*range(16)] * 2, -1, 15, [*range(15, -1, -1)] * 2),
    "lower edge": ("int4", [*range(-15, 1)] * 2, 1, -15, [*range(16)] * 2),
    "ties": ("int4", [-8, 7, 0.5, 1.5, -0.5], 1, -8, [0, 15, 8, 10, 8]),
    "step shrinks and 6 is clamped": ("int4", [-8, 6], 8 / 9, -8, [0, 15, 9]),
    "far from zero": ("int4", [3] + [2.5] * 31, -3 / 90, 3, [0] + [15] * 31),
    "constant": ("int4", [3] * 32, -1e-7, 3, [0]),
    "zeros": ("int4", [0], -1e-7, 0, [0]),
    "8 bits, lower edge": ("int8", [-128, 127], 1, -128, [0, 255, 128]),
}


@pytest.mark.parametrize("case", AFFINE_GROUPS)
def test_affine_groups(case: str) -> None:
    quant_type, weights, scale, bias, codes = AFFINE_GROUPS[case]
    group_size = 32 if quant_type == "int4" else 64
    group = [*weights, *[0] * (group_size - len(weights))]
    for kernel, dtype in ((kernel, dtype) for kernel in KERNELS for dtype in DTYPES):
        quantized = kernels.quantize(np.array([group], dtype), quant_type, kernel=kernel)
        assert codes_of(quantized) == [*codes, *codes[-1:] * (group_size - len(codes))]
        assert quantized.scale.tolist() == np.array([[scale]], np.float32).astype(dtype).tolist()
        assert quantized.bias is not None
        assert quantized.bias.tolist() == [[bias]]


FP_GROUPS: dict[str, tuple[str, list[float], int, list[int]]] = {
    "values": ("nvfp4", [0, 0.5, 1, 1.5, 2, 3, 4, 6], 0x38, [0, 1, 2, 3, 4, 5, 6, 7]),
    "negative": ("nvfp4", [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6], 0x38, [*range(8, 16)]),
    "ties": ("nvfp4", [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], 0x38, [7, 0, 2, 2, 4, 4, 6, 6]),
    "scale rounds up to 1.125": ("nvfp4", [6.4, 2.25], 0x39, [7, 4]),
    "scale saturates": ("nvfp4", [21504, 2688, 448, -21504], 0x7E, [7, 7, 2, 15]),
    "smallest scale": ("nvfp4", [6 * 2.0**-9, -(2.0**-9)], 0x01, [7, 10]),
    "scale zero gives codes 0": ("nvfp4", [6 * 2.0**-10, -6 * 2.0**-10], 0x00, [0, 0]),
    "mxfp4 scale 1": ("mxfp4", [6, -3, 0.25, 5], 127, [7, 13, 0, 6]),
    "mxfp4 scale 1/2": ("mxfp4", [3, -0.125, -0.375], 126, [7, 8, 10]),
    "mxfp4 zeros keep their sign": ("mxfp4", [-0.0, 0], 0, [8, 0]),
    "mxfp8 values": ("mxfp8", [448, 1, -1, 0, -0.0], 127, [0x7E, 0x38, 0xB8, 0, 0x80]),
    "mxfp8 subnormals": ("mxfp8", [448, 2.0**-9, -(2.0**-10)], 127, [0x7E, 1, 0x80]),
    "mxfp8 ties": ("mxfp8", [448, 432, 400, -17, -19], 127, [0x7E, 0x7E, 0x7C, 0xD8, 0xDA]),
    "mxfp8 scale 2": ("mxfp8", [464, -2], 128, [0x76, 0xB8]),
}


@pytest.mark.parametrize("case", FP_GROUPS)
def test_fp_groups(case: str) -> None:
    quant_type, weights, scale, codes = FP_GROUPS[case]
    group_size = 16 if quant_type == "nvfp4" else 32
    for kernel, dtype in ((kernel, dtype) for kernel in KERNELS for dtype in DTYPES):
        group = np.zeros((1, group_size), dtype)
        group[0, : len(weights)] = weights
        quantized = kernels.quantize(group, quant_type, kernel=kernel)
        assert quantized.scale.tolist() == [[scale]]
        assert codes_of(quantized) == codes + [0] * (group_size - len(codes))


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
