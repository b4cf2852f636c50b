"""Groups and words computed by hand: every kernel gives these parts and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.weights import BF16, DTYPES, F32, TARGETS, TWIN, raw

from blobstore import kernels
from blobstore.formats.quant import Quantization, QuantType
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]

any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
any_kernel = pytest.mark.parametrize(
    "kernel", [*TARGETS.values(), TWIN], ids=lambda kernel: kernel.name
)


def codes_of(quantized: QuantizedArray[Array]) -> list[int]:
    """Return the codes of all words, read with shifts: the first code is in the lowest bits."""
    bits = quantized.quant_type.bits
    return [
        int(word) >> shift & (1 << bits) - 1
        for word in quantized.weight.ravel()
        for shift in range(0, 32, bits)
    ]


@pytest.mark.parametrize(
    ("quant_type", "words"),
    [("int4", [0x76543210, 0xFEDCBA98]), ("int8", [0x03020100, 0x07060504])],
)
def test_the_first_code_of_a_word_is_in_its_lowest_bits(quant_type: str, words: list[int]) -> None:
    levels = 15 if quant_type == "int4" else 255
    weights = np.resize(np.arange(-levels, 1, dtype=np.float32), (1, 256))
    weights[:, 64:] = np.resize(np.array([-levels, 0], np.float32), 192)
    weights[:, 63] = 0
    quantized = kernels.quantize(weights, quant_type, group_size=64)
    assert quantized.weight[0, :2].tolist() == words
    assert quantized.scale.tolist() == [[1, 1, 1, 1]]
    assert quantized.bias is not None
    assert quantized.bias.tolist() == [[-levels] * 4]


@any_kernel
@any_dtype
@pytest.mark.parametrize(
    ("quant_type", "weights", "scale", "bias", "codes"),
    [
        pytest.param(
            "int4", [*range(16)] * 2, -1, 15, [*range(15, -1, -1)] * 2, id="int4 upper edge"
        ),
        pytest.param("int4", [*range(-15, 1)] * 2, 1, -15, [*range(16)] * 2, id="int4 lower edge"),
        pytest.param(
            "int4",
            [-8, 7, 0.5, 1.5, -0.5] + [0] * 27,
            1,
            -8,
            [0, 15, 8, 10, 8] + [8] * 27,
            id="int4 ties",
        ),
        pytest.param(
            "int4",
            [-8, 6] + [0] * 30,
            8 / 9,
            -8,
            [0, 15] + [9] * 30,
            id="int4 step shrinks and 6 is clamped",
        ),
        pytest.param(
            "int4", [3] + [2.5] * 31, -3 / 90, 3, [0] + [15] * 31, id="int4 far from zero"
        ),
        pytest.param("int4", [3] * 32, -1e-7, 3, [0] * 32, id="int4 constant"),
        pytest.param("int4", [0] * 32, -1e-7, 0, [0] * 32, id="int4 zeros"),
        pytest.param(
            "int8", [-128, 127] + [0] * 62, 1, -128, [0, 255] + [128] * 62, id="int8 lower edge"
        ),
        pytest.param(
            "int8",
            [127.5, -127.5] + [0] * 62,
            -255 / 256,
            127.5,
            [0, 255] + [128] * 62,
            id="int8 even edges",
        ),
    ],
)
def test_affine_groups_computed_by_hand(
    quant_type: str,
    weights: list[float],
    scale: float,
    bias: float,
    codes: list[int],
    dtype: np.dtype[Any],
    kernel: kernels.Kernel,
) -> None:
    quantized = kernels.quantize(
        np.array([weights], dtype), quant_type, group_size=len(weights), kernel=kernel
    )
    assert codes_of(quantized) == codes
    assert quantized.scale.dtype == dtype
    assert quantized.scale.tolist() == np.array([[scale]], np.float32).astype(dtype).tolist()
    assert quantized.bias is not None
    assert quantized.bias.tolist() == [[bias]]


@any_kernel
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_constant_group_beyond_the_range_of_steps_has_scale_minus_zero_and_comes_back_exactly(
    sign: int, dtype: np.dtype[Any], kernel: kernels.Kernel
) -> None:
    weights = np.full((1, 32), sign * 1e32, dtype)
    quantized = kernels.quantize(weights, "int4", kernel=kernel)
    assert quantized.scale.tolist() == [[0]]
    assert np.signbit(quantized.scale).tolist() == [[True]]
    np.testing.assert_array_equal(
        kernels.dequantize(quantized, kernel=kernel), weights.astype(np.float32)
    )


@any_kernel
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_group_whose_range_overflows_float32_has_an_infinite_scale(
    dtype: np.dtype[Any], kernel: kernels.Kernel
) -> None:
    weights = np.resize(np.array([3e38, -2e38], dtype), (1, 32))
    quantized = kernels.quantize(weights, "int4", kernel=kernel)
    assert quantized.scale.tolist() == [[-np.inf]]
    assert not np.isfinite(kernels.dequantize(quantized, kernel=kernel)).any()


@any_kernel
@pytest.mark.parametrize(
    ("quant_type", "last"), [("mxfp4", 3.5 * 2.0**126), ("mxfp8", 248 * 2.0**120)]
)
def test_the_largest_float32_weights_round_to_an_mx_value_beyond_float32(
    quant_type: str, last: float, kernel: kernels.Kernel
) -> None:
    weights = np.zeros((1, 32), np.float32)
    weights[0, :2] = [last, np.nextafter(np.float32(last), np.float32(0))]
    values = kernels.dequantize(kernels.quantize(weights, quant_type, kernel=kernel), kernel=kernel)
    assert np.isinf(values[0]).tolist() == [True] + [False] * 31


@any_kernel
@any_dtype
@pytest.mark.parametrize(
    ("quant_type", "weights", "scale", "codes"),
    [
        pytest.param(
            "nvfp4", [0, 0.5, 1, 1.5, 2, 3, 4, 6], 0x38, [0, 1, 2, 3, 4, 5, 6, 7], id="nvfp4 values"
        ),
        pytest.param(
            "nvfp4",
            [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6],
            0x38,
            [*range(8, 16)],
            id="nvfp4 negative values",
        ),
        pytest.param(
            "nvfp4",
            [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5],
            0x38,
            [7, 0, 2, 2, 4, 4, 6, 6],
            id="nvfp4 ties",
        ),
        pytest.param("nvfp4", [-12, -0.5, 1.5, 12], 0x40, [15, 8, 2, 7], id="nvfp4 scale 2"),
        pytest.param(
            "nvfp4", [6.3, 3], 0x38, [7, 5], id="nvfp4 scale rounds down and 6.3 saturates"
        ),
        pytest.param("nvfp4", [6.4, 2.25], 0x39, [7, 4], id="nvfp4 scale rounds up to 1.125"),
        pytest.param(
            "nvfp4", [21504, 2688, 448, -21504], 0x7E, [7, 7, 2, 15], id="nvfp4 scale saturates"
        ),
        pytest.param("nvfp4", [6 * 2.0**-9, -(2.0**-9)], 0x01, [7, 10], id="nvfp4 smallest scale"),
        pytest.param(
            "nvfp4",
            [6 * 2.0**-10, -6 * 2.0**-10],
            0x00,
            [0, 0],
            id="nvfp4 scale zero gives codes 0",
        ),
        pytest.param("mxfp4", [6, -3, 0.25, 5], 127, [7, 13, 0, 6], id="mxfp4 scale 1"),
        pytest.param("mxfp4", [6.5, -2.5, 3.5, 12], 128, [5, 10, 4, 7], id="mxfp4 scale 2"),
        pytest.param("mxfp4", [3, -0.125, -0.375], 126, [7, 8, 10], id="mxfp4 scale 1/2"),
        pytest.param("mxfp4", [-0.0, 0], 0, [8, 0], id="mxfp4 zeros keep their sign"),
        pytest.param(
            "mxfp8", [448, 1, -1, 0, -0.0], 127, [0x7E, 0x38, 0xB8, 0, 0x80], id="mxfp8 values"
        ),
        pytest.param(
            "mxfp8",
            [448, 2.0**-9, -(2.0**-10), 3 * 2.0**-10],
            127,
            [0x7E, 1, 0x80, 2],
            id="mxfp8 subnormals",
        ),
        pytest.param(
            "mxfp8", [448, 432, 400, -17, -19], 127, [0x7E, 0x7E, 0x7C, 0xD8, 0xDA], id="mxfp8 ties"
        ),
        pytest.param("mxfp8", [464, -2], 128, [0x76, 0xB8], id="mxfp8 scale 2"),
    ],
)
def test_fp_groups_computed_by_hand(
    quant_type: str,
    weights: list[float],
    scale: int,
    codes: list[int],
    dtype: np.dtype[Any],
    kernel: kernels.Kernel,
) -> None:
    group = np.zeros((1, QuantType(quant_type).group_sizes[0]), dtype)
    group[0, : len(weights)] = weights
    quantized = kernels.quantize(group, quant_type, kernel=kernel)
    assert quantized.scale.tolist() == [[scale]]
    assert codes_of(quantized) == codes + [0] * (group.size - len(codes))


@any_kernel
def test_affine_words_dequantize_to_values_computed_by_hand(kernel: kernels.Kernel) -> None:
    words = np.array([[0x76543210, 0xFEDCBA98, 0, 0xFFFFFFFF]], np.uint32)
    scale, bias = np.array([[0.5]], BF16), np.array([[-3]], BF16)
    quantized = QuantizedArray(words, scale, bias, None, Quantization(QuantType.INT4, 32))
    expected = [*(code / 2 - 3 for code in range(16)), *[-3] * 8, *[4.5] * 8]
    assert kernels.dequantize(quantized, kernel=kernel).tolist() == [expected]


@any_kernel
def test_affine_dequantize_rounds_the_product_before_it_adds_the_bias(
    kernel: kernels.Kernel,
) -> None:
    scale = np.float32(1 + 2.0**-23)
    words = np.full((1, 4), 0xBBBBBBBB, np.uint32)
    parts = np.array([[scale]]), np.array([[-11]], np.float32)
    quantized = QuantizedArray(words, *parts, None, Quantization(QuantType.INT4, 32))
    assert set(kernels.dequantize(quantized, kernel=kernel).ravel().tolist()) == {2.0**-20}
    assert float(scale) * 11 - 11 == 11 * 2.0**-23


@any_kernel
def test_a_global_scale_multiplies_the_rounded_product_of_code_and_scale(
    kernel: kernels.Kernel,
) -> None:
    values = np.array(
        [[0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]], np.float32
    )
    plain = kernels.quantize(values * np.float32(1.75), "nvfp4", kernel=kernel)
    factor = np.array([0.1], np.float32)
    scaled = QuantizedArray(plain.weight, plain.scale, None, factor, plain.quantization)
    assert plain.scale.tolist() == [[0x3E]]
    expected = values * np.float32(1.75) * factor
    assert (expected != values * (np.float32(1.75) * factor)).any()
    np.testing.assert_array_equal(raw(kernels.dequantize(scaled, kernel=kernel)), raw(expected))
