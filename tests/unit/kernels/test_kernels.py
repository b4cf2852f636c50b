"""The native kernels equal their NumPy twin bit for bit, and `quantize` and `dequantize` keep what they promise.

Promised are shapes, dtypes, packing order, independence of how rows are cut, and which error names which fault.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.weights import edge_weights, random_weights

from blobstore import kernels
from blobstore.arrays import QuantizedArray
from blobstore.errors import NonFiniteWeightError, UsageError
from blobstore.kernels import _native
from blobstore.kernels.reference import ReferenceKernel
from blobstore.quant import Quantization, QuantType

Array = np.ndarray[Any, Any]

BF16, F16, F32 = (np.dtype(kind) for kind in (ml_dtypes.bfloat16, np.float16, np.float32))
DTYPES = [BF16, F16, F32]
AFFINE = [(name, size) for name in ("int4", "int8") for size in (32, 64, 128)]
FP = [("nvfp4", 16), ("mxfp4", 32), ("mxfp8", 32)]
EVERY = AFFINE + FP
NATIVE, TWIN = kernels.KERNELS["native"], kernels.KERNELS["reference"]

any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
any_16_bit_dtype = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
any_form = pytest.mark.parametrize(("quant_type", "group_size"), EVERY)


@pytest.fixture(autouse=True)
def kernel_in_use() -> Iterator[None]:
    before = kernels.active().name
    yield
    kernels.use(before)


def every_16_bit_value(dtype: np.dtype[Any]) -> Array:
    return np.arange(2**16, dtype=np.uint16).view(dtype)


def raw(array: Array) -> Array:
    return array.view(f"u{array.dtype.itemsize}")


def raw_or_nan(values: Array) -> Array:
    """Return the bits of float32 values, one pattern for all NaNs."""
    return np.where(np.isnan(values), np.uint32(0x7FC00000), raw(values))


def parts_of(quantized: QuantizedArray[Array]) -> list[Array]:
    return [part for part in (quantized.weight, quantized.scale, quantized.bias) if part is not None]


def codes_of(quantized: QuantizedArray[Array]) -> list[int]:
    """Return the codes of all words, read with shifts: the first code is in the lowest bits."""
    bits = quantized.quant_type.bits
    return [int(word) >> shift & (1 << bits) - 1 for word in quantized.weight.ravel() for shift in range(0, 32, bits)]


def assert_same_parts(left: QuantizedArray[Array], right: QuantizedArray[Array]) -> None:
    assert left.quantization == right.quantization
    for part, expected in zip(parts_of(left), parts_of(right), strict=True):
        assert part.dtype == expected.dtype
        np.testing.assert_array_equal(raw(part), raw(expected))


def assert_dequantizes_as_twin(quantized: QuantizedArray[Array]) -> None:
    native, twin = (kernels.dequantize(quantized, kernel=kernel) for kernel in (NATIVE, TWIN))
    np.testing.assert_array_equal(raw_or_nan(native), raw_or_nan(twin))


def assert_equals_twin(weights: Array, quant_type: str, group_size: int) -> None:
    native, twin = (kernels.quantize(weights, quant_type, group_size=group_size, kernel=kernel) for kernel in (NATIVE, TWIN))
    assert_same_parts(native, twin)
    assert_dequantizes_as_twin(native)


@any_dtype
@any_form
def test_native_equals_twin_on_random_weights(quant_type: str, group_size: int, dtype: np.dtype[Any]) -> None:
    assert_equals_twin(random_weights(dtype, 512, 1280), quant_type, group_size)


@any_dtype
@any_form
def test_native_equals_twin_on_edge_groups(quant_type: str, group_size: int, dtype: np.dtype[Any]) -> None:
    assert_equals_twin(edge_weights(dtype), quant_type, group_size)


@any_16_bit_dtype
@any_form
def test_native_equals_twin_with_every_16_bit_value_as_the_edge_of_a_group(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    every = every_16_bit_value(dtype)
    with np.errstate(invalid="ignore"):
        edges = every[np.isfinite(every)].astype(np.float32)[:, None]
    weights = (edges * np.linspace(-0.5, 1, group_size, dtype=np.float32)).astype(dtype)
    assert_equals_twin(weights, quant_type, group_size)


@any_16_bit_dtype
@pytest.mark.parametrize("quant_type", ["int4", "int8"])
def test_native_dequantizes_as_twin_with_every_16_bit_scale_and_bias(quant_type: str, dtype: np.dtype[Any]) -> None:
    scales = every_16_bit_value(dtype).reshape(256, 256)
    biases = np.ascontiguousarray(scales[::-1, ::-1])
    kind = QuantType(quant_type)
    words = np.random.default_rng(0).integers(0, 2**32, (256, 256 * kind.bits), dtype=np.uint32)
    assert_dequantizes_as_twin(QuantizedArray(words, scales, biases, None, Quantization(kind, 32)))


@pytest.mark.parametrize("global_scale", [None, 0.7, -0.0, 1e30, 1e-44])
@pytest.mark.parametrize(("quant_type", "group_size"), FP)
def test_native_dequantizes_as_twin_with_every_fp_scale_and_code(
    quant_type: str, group_size: int, global_scale: float | None
) -> None:
    octets = np.arange(256, dtype=np.uint8)
    quantization = Quantization(QuantType(quant_type), group_size)
    cols = 256 * 8 // quantization.quant_type.bits
    scales = np.repeat(octets[:, None], cols // group_size, axis=1)
    words = np.repeat(octets.view(np.uint32)[None], 256, axis=0)
    factor = None if global_scale is None else np.array([global_scale], np.float32)
    assert_dequantizes_as_twin(QuantizedArray(words, scales, None, factor, quantization))


@any_dtype
@pytest.mark.parametrize("shape", [(6, 256), (2, 3, 256), (1, 2, 3, 256), (0, 256), (3, 0)])
@any_form
def test_parts_have_the_shapes_and_dtypes_of_the_table(
    quant_type: str, group_size: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    weights = random_weights(dtype, *shape)
    quantized = kernels.quantize(weights, quant_type, group_size=group_size)
    bits = quantized.quant_type.bits
    is_affine = quant_type.startswith("int")
    assert (quantized.weight.shape, quantized.weight.dtype) == ((*shape[:-1], shape[-1] * bits // 32), np.uint32)
    assert quantized.scale.shape == (*shape[:-1], shape[-1] // group_size)
    assert quantized.scale.dtype == (dtype if is_affine else np.uint8)
    assert quantized.global_scale is None
    if is_affine:
        assert quantized.bias is not None
        assert (quantized.bias.shape, quantized.bias.dtype) == (quantized.scale.shape, dtype)
    else:
        assert quantized.bias is None
    values = kernels.dequantize(quantized)
    assert (values.shape, values.dtype) == (shape, np.float32)


@any_form
def test_a_tensor_of_rank_4_is_its_rows(quant_type: str, group_size: int) -> None:
    weights = random_weights(BF16, 2, 3, 4, 128)
    deep = kernels.quantize(weights, quant_type, group_size=group_size)
    flat = kernels.quantize(weights.reshape(24, 128), quant_type, group_size=group_size)
    for part, expected in zip(parts_of(deep), parts_of(flat), strict=True):
        np.testing.assert_array_equal(raw(part).reshape(24, -1), raw(expected))


@any_dtype
@any_form
def test_a_non_contiguous_input_is_its_contiguous_copy(quant_type: str, group_size: int, dtype: np.dtype[Any]) -> None:
    square = random_weights(dtype, 256, 256)
    for view in (square.T, square[::-3, ::2], square[:, ::-1], square.reshape(2, 128, 256).swapaxes(0, 1)):
        assert not view.flags.c_contiguous
        copy = kernels.quantize(view.copy(order="C"), quant_type, group_size=group_size)
        assert_same_parts(kernels.quantize(view, quant_type, group_size=group_size), copy)


@any_form
def test_non_contiguous_parts_dequantize_as_their_copies(quant_type: str, group_size: int) -> None:
    whole = kernels.quantize(random_weights(F32, 8, 256), quant_type, group_size=group_size)
    bias = None if whole.bias is None else whole.bias[::2]
    every_second = QuantizedArray(whole.weight[::2], whole.scale[::2], bias, None, whole.quantization)
    np.testing.assert_array_equal(raw(kernels.dequantize(every_second)), raw(kernels.dequantize(whole)[::2].copy()))


@pytest.mark.parametrize("cuts", [[1], [3, 4], [5, 6, 63]], ids=str)
@any_form
def test_results_do_not_depend_on_how_rows_are_cut(quant_type: str, group_size: int, cuts: list[int]) -> None:
    weights = random_weights(BF16, 64, 384)
    whole = kernels.quantize(weights, quant_type, group_size=group_size)
    pieces = [kernels.quantize(rows, quant_type, group_size=group_size) for rows in np.split(weights, cuts)]
    for part, *cut in zip(parts_of(whole), *map(parts_of, pieces), strict=True):
        np.testing.assert_array_equal(raw(part), raw(np.concatenate(cut)))
    values = [kernels.dequantize(piece) for piece in pieces]
    np.testing.assert_array_equal(raw(kernels.dequantize(whole)), raw(np.concatenate(values)))


@pytest.mark.parametrize("kernel", [NATIVE, TWIN], ids=lambda kernel: kernel.name)
@any_dtype
@any_form
def test_inputs_are_only_read(quant_type: str, group_size: int, dtype: np.dtype[Any], kernel: kernels.Kernel) -> None:
    weights = random_weights(dtype, 4, 128)
    before = weights.tobytes()
    weights.flags.writeable = False
    quantized = kernels.quantize(weights, quant_type, group_size=group_size, kernel=kernel)
    stored = [part.tobytes() for part in parts_of(quantized)]
    for part in parts_of(quantized):
        part.flags.writeable = False
    kernels.dequantize(quantized, kernel=kernel)
    assert weights.tobytes() == before
    assert [part.tobytes() for part in parts_of(quantized)] == stored


@pytest.mark.parametrize(("quant_type", "words"), [("int4", [0x76543210, 0xFEDCBA98]), ("int8", [0x03020100, 0x07060504])])
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


@pytest.mark.parametrize("kernel", [NATIVE, TWIN], ids=lambda kernel: kernel.name)
@any_dtype
@pytest.mark.parametrize(
    ("quant_type", "weights", "scale", "bias", "codes"),
    [
        pytest.param("int4", [*range(16)] * 2, -1, 15, [*range(15, -1, -1)] * 2, id="int4 upper edge"),
        pytest.param("int4", [*range(-15, 1)] * 2, 1, -15, [*range(16)] * 2, id="int4 lower edge"),
        pytest.param("int4", [-8, 7, 0.5, 1.5, -0.5] + [0] * 27, 1, -8, [0, 15, 8, 10, 8] + [8] * 27, id="int4 ties"),
        pytest.param("int4", [-8, 6] + [0] * 30, 8 / 9, -8, [0, 15] + [9] * 30, id="int4 step shrinks and 6 is clamped"),
        pytest.param("int4", [3] + [2.5] * 31, -3 / 90, 3, [0] + [15] * 31, id="int4 far from zero"),
        pytest.param("int4", [3] * 32, -1e-7, 3, [0] * 32, id="int4 constant"),
        pytest.param("int4", [0] * 32, -1e-7, 0, [0] * 32, id="int4 zeros"),
        pytest.param("int8", [-128, 127] + [0] * 62, 1, -128, [0, 255] + [128] * 62, id="int8 lower edge"),
        pytest.param("int8", [127.5, -127.5] + [0] * 62, -255 / 256, 127.5, [0, 255] + [128] * 62, id="int8 even edges"),
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
    quantized = kernels.quantize(np.array([weights], dtype), quant_type, group_size=len(weights), kernel=kernel)
    assert codes_of(quantized) == codes
    assert quantized.scale.dtype == dtype
    assert quantized.scale.tolist() == np.array([[scale]], np.float32).astype(dtype).tolist()
    assert quantized.bias is not None
    assert quantized.bias.tolist() == [[bias]]


@pytest.mark.parametrize("kernel", [NATIVE, TWIN], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_constant_group_beyond_the_range_of_steps_has_scale_minus_zero_and_comes_back_exactly(
    sign: int, dtype: np.dtype[Any], kernel: kernels.Kernel
) -> None:
    weights = np.full((1, 32), sign * 1e32, dtype)
    quantized = kernels.quantize(weights, "int4", kernel=kernel)
    assert quantized.scale.tolist() == [[0]]
    assert np.signbit(quantized.scale).tolist() == [[True]]
    np.testing.assert_array_equal(kernels.dequantize(quantized, kernel=kernel), weights.astype(np.float32))


@pytest.mark.parametrize("kernel", [NATIVE, TWIN], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_group_whose_range_overflows_float32_has_an_infinite_scale(dtype: np.dtype[Any], kernel: kernels.Kernel) -> None:
    weights = np.resize(np.array([3e38, -2e38], dtype), (1, 32))
    quantized = kernels.quantize(weights, "int4", kernel=kernel)
    assert quantized.scale.tolist() == [[-np.inf]]
    assert not np.isfinite(kernels.dequantize(quantized, kernel=kernel)).any()


@pytest.mark.parametrize("kernel", [NATIVE, TWIN], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("quant_type", "last"), [("mxfp4", 3.5 * 2.0**126), ("mxfp8", 248 * 2.0**120)])
def test_the_largest_float32_weights_round_to_an_mx_value_beyond_float32(
    quant_type: str, last: float, kernel: kernels.Kernel
) -> None:
    weights = np.zeros((1, 32), np.float32)
    weights[0, :2] = [last, np.nextafter(np.float32(last), np.float32(0))]
    values = kernels.dequantize(kernels.quantize(weights, quant_type, kernel=kernel), kernel=kernel)
    assert np.isinf(values[0]).tolist() == [True] + [False] * 31


@pytest.mark.parametrize("kernel", [NATIVE, TWIN], ids=lambda kernel: kernel.name)
@any_dtype
@pytest.mark.parametrize(
    ("quant_type", "weights", "scale", "codes"),
    [
        pytest.param("nvfp4", [0, 0.5, 1, 1.5, 2, 3, 4, 6], 0x38, [0, 1, 2, 3, 4, 5, 6, 7], id="nvfp4 values"),
        pytest.param("nvfp4", [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6], 0x38, [*range(8, 16)], id="nvfp4 negative values"),
        pytest.param("nvfp4", [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], 0x38, [7, 0, 2, 2, 4, 4, 6, 6], id="nvfp4 ties"),
        pytest.param("nvfp4", [-12, -0.5, 1.5, 12], 0x40, [15, 8, 2, 7], id="nvfp4 scale 2"),
        pytest.param("nvfp4", [6.3, 3], 0x38, [7, 5], id="nvfp4 scale rounds down and 6.3 saturates"),
        pytest.param("nvfp4", [6.4, 2.25], 0x39, [7, 4], id="nvfp4 scale rounds up to 1.125"),
        pytest.param("nvfp4", [21504, 2688, 448, -21504], 0x7E, [7, 7, 2, 15], id="nvfp4 scale saturates"),
        pytest.param("nvfp4", [6 * 2.0**-9, -(2.0**-9)], 0x01, [7, 10], id="nvfp4 smallest scale"),
        pytest.param("nvfp4", [6 * 2.0**-10, -6 * 2.0**-10], 0x00, [0, 0], id="nvfp4 scale zero gives codes 0"),
        pytest.param("mxfp4", [6, -3, 0.25, 5], 127, [7, 13, 0, 6], id="mxfp4 scale 1"),
        pytest.param("mxfp4", [6.5, -2.5, 3.5, 12], 128, [5, 10, 4, 7], id="mxfp4 scale 2"),
        pytest.param("mxfp4", [3, -0.125, -0.375], 126, [7, 8, 10], id="mxfp4 scale 1/2"),
        pytest.param("mxfp4", [-0.0, 0], 0, [8, 0], id="mxfp4 zeros keep their sign"),
        pytest.param("mxfp8", [448, 1, -1, 0, -0.0], 127, [0x7E, 0x38, 0xB8, 0, 0x80], id="mxfp8 values"),
        pytest.param("mxfp8", [448, 2.0**-9, -(2.0**-10), 3 * 2.0**-10], 127, [0x7E, 1, 0x80, 2], id="mxfp8 subnormals"),
        pytest.param("mxfp8", [448, 432, 400, -17, -19], 127, [0x7E, 0x7E, 0x7C, 0xD8, 0xDA], id="mxfp8 ties"),
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


@pytest.mark.parametrize("kernel", [NATIVE, TWIN], ids=lambda kernel: kernel.name)
def test_affine_words_dequantize_to_values_computed_by_hand(kernel: kernels.Kernel) -> None:
    words = np.array([[0x76543210, 0xFEDCBA98, 0, 0xFFFFFFFF]], np.uint32)
    scale, bias = np.array([[0.5]], BF16), np.array([[-3]], BF16)
    quantized = QuantizedArray(words, scale, bias, None, Quantization(QuantType.INT4, 32))
    expected = [*(code / 2 - 3 for code in range(16)), *[-3] * 8, *[4.5] * 8]
    assert kernels.dequantize(quantized, kernel=kernel).tolist() == [expected]


@pytest.mark.parametrize("kernel", [NATIVE, TWIN], ids=lambda kernel: kernel.name)
def test_affine_dequantize_rounds_the_product_before_it_adds_the_bias(kernel: kernels.Kernel) -> None:
    scale = np.float32(1 + 2.0**-23)
    words = np.full((1, 4), 0xBBBBBBBB, np.uint32)
    parts = np.array([[scale]]), np.array([[-11]], np.float32)
    quantized = QuantizedArray(words, *parts, None, Quantization(QuantType.INT4, 32))
    assert set(kernels.dequantize(quantized, kernel=kernel).ravel().tolist()) == {2.0**-20}
    assert float(scale) * 11 - 11 == 11 * 2.0**-23


@pytest.mark.parametrize("kernel", [NATIVE, TWIN], ids=lambda kernel: kernel.name)
def test_a_global_scale_multiplies_the_rounded_product_of_code_and_scale(kernel: kernels.Kernel) -> None:
    values = np.array([[0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]], np.float32)
    plain = kernels.quantize(values * np.float32(1.75), "nvfp4", kernel=kernel)
    factor = np.array([0.1], np.float32)
    scaled = QuantizedArray(plain.weight, plain.scale, None, factor, plain.quantization)
    assert plain.scale.tolist() == [[0x3E]]
    expected = values * np.float32(1.75) * factor
    assert (expected != values * (np.float32(1.75) * factor)).any()
    np.testing.assert_array_equal(raw(kernels.dequantize(scaled, kernel=kernel)), raw(expected))


def test_quantize_into_overwrites_all_of_the_parts_and_returns_minus_1() -> None:
    weights = random_weights(F16, 4, 128)
    expected = kernels.quantize(weights, "int8")
    parts = [np.full_like(part, 77) for part in parts_of(expected)]
    assert kernels.quantize_into(weights, expected.quantization, parts) == -1
    assert_same_parts(QuantizedArray(parts[0], parts[1], parts[2], None, expected.quantization), expected)


@pytest.mark.parametrize("kernel", [NATIVE, TWIN], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("quant_type", ["int4", "mxfp8"])
def test_quantize_into_returns_the_flat_index_of_the_first_bad_weight(quant_type: str, kernel: kernels.Kernel) -> None:
    weights = random_weights(F32, 4, 128)
    parts = parts_of(kernels.quantize(weights, quant_type))
    weights[1, 7] = weights[3, 0] = np.inf
    quantization = kernels.quantization_of(quant_type)
    assert kernels.quantize_into(weights, quantization, parts, kernel=kernel) == 135


@pytest.mark.parametrize("kernel", [NATIVE, TWIN], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@any_dtype
@pytest.mark.parametrize("quant_type", ["int4", "int8", "nvfp4", "mxfp4", "mxfp8"])
def test_a_non_finite_weight_is_an_error_with_the_index_of_the_first(
    quant_type: str, dtype: np.dtype[Any], bad: float, kernel: kernels.Kernel
) -> None:
    weights = random_weights(dtype, 2, 3, 64)
    weights[1, 0, 63] = weights[1, 2, 0] = weights[1, 0, 62] = bad
    with pytest.raises(NonFiniteWeightError, match=r"\[1, 0, 62\] is -?(nan|inf)") as caught:
        kernels.quantize(weights, quant_type, kernel=kernel)
    assert caught.value.index == (1, 0, 62)


@pytest.mark.parametrize("index", [(0, 0), (0, 63), (31, 0), (31, 63)], ids=str)
def test_the_index_of_a_non_finite_weight_is_the_caller_s_and_not_the_copy_s(index: tuple[int, int]) -> None:
    weights = np.ones((64, 32), np.float32).T
    weights[index] = np.nan
    with pytest.raises(NonFiniteWeightError) as caught:
        kernels.quantize(weights, "int4")
    assert caught.value.index == index


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(64, np.float32), "rank 2"),
        (np.array(1.0, np.float32), "rank 2"),
        (np.ones((2, 64), np.float64), "F64"),
        (np.ones((2, 64), np.int32), "I32"),
        (np.ones((2, 64), np.uint8), "U8"),
        (np.ones((2, 64), np.bool_), "BOOL"),
        (np.ones((2, 64), np.complex64), "C64"),
        (np.ones((2, 64), ml_dtypes.float8_e4m3fn), "F8_E4M3"),
        (np.ones((2, 72), np.float32), "32 do not divide"),
        (np.ones((64, 31), np.float32), "32 do not divide"),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else "",
)
@pytest.mark.parametrize("quant_type", ["int4", "mxfp8"])
def test_an_array_that_cannot_be_quantized_is_a_usage_error(quant_type: str, array: Array, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kernels.quantize(array, quant_type)


@pytest.mark.parametrize(
    ("quant_type", "group_size"),
    [
        *((quant_type, size) for quant_type in ("int4", "int8") for size in (48, 16, 256, 0, -32, 32.0, True, "32")),
        *(("nvfp4", size) for size in (32, 64)),
        *((quant_type, size) for quant_type in ("mxfp4", "mxfp8") for size in (16, 64)),
    ],
)
def test_a_group_size_that_the_type_does_not_have_is_a_usage_error(quant_type: str, group_size: Any) -> None:
    with pytest.raises(UsageError, match=f"{quant_type} has no groups of {group_size!r}"):
        kernels.quantize(np.ones((2, 768), np.float32), quant_type, group_size=group_size)


@pytest.mark.parametrize("quant_type", ["int3", "", "q6", "int4 ", "affine"])
def test_an_unknown_type_is_a_usage_error(quant_type: str) -> None:
    with pytest.raises(UsageError, match="unknown quantization type"):
        kernels.quantize(np.ones((2, 64), np.float32), quant_type)


def test_an_unknown_method_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="unknown quantization method 'nope'"):
        kernels.quantize(np.ones((2, 64), np.float32), "int4", method="nope")


def test_affine_parts_without_a_bias_are_a_usage_error() -> None:
    quantized = kernels.quantize(np.ones((2, 64), np.float32), "int4")
    with pytest.raises(UsageError, match="has the parts"):
        kernels.dequantize(QuantizedArray(quantized.weight, quantized.scale, None, None, quantized.quantization))


@pytest.mark.parametrize(
    ("alias", "name"), [("q4", "int4"), ("fp4", "int4"), ("q8", "int8"), ("fp8", "int8"), ("NVFP4", "nvfp4")]
)
def test_aliases_mean_the_types_that_ollama_means(alias: str, name: str) -> None:
    weights = random_weights(BF16, 2, 128)
    quantized = kernels.quantize(weights, alias)
    assert quantized.quant_type is QuantType(name)
    assert_same_parts(quantized, kernels.quantize(weights, QuantType(name)))


@pytest.mark.parametrize(
    ("quant_type", "group_size"), [("int4", 32), ("int8", 64), ("nvfp4", 16), ("mxfp4", 32), ("mxfp8", 32)]
)
def test_the_group_size_is_the_default_of_the_type_when_none_is_given(quant_type: str, group_size: int) -> None:
    quantized = kernels.quantize(random_weights(BF16, 2, 128), quant_type)
    assert quantized.quantization == Quantization(QuantType(quant_type), group_size)


def test_use_chooses_the_kernel_of_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Recording(ReferenceKernel):
        name = "recording"

        def quantize_fp(self, *arguments: Any) -> int:
            calls.append("quantize")
            return super().quantize_fp(*arguments)

        def dequantize_fp(self, *arguments: Any) -> None:
            calls.append("dequantize")
            super().dequantize_fp(*arguments)

    monkeypatch.setitem(kernels.KERNELS, "recording", Recording())
    kernels.use("recording")
    assert kernels.active().name == "recording"
    kernels.dequantize(kernels.quantize(np.ones((2, 64), np.float32), "mxfp4"))
    assert calls == ["quantize", "dequantize"]
    kernels.use("native")
    kernels.dequantize(kernels.quantize(np.ones((2, 64), np.float32), "mxfp4"))
    assert calls == ["quantize", "dequantize"]


def test_native_is_in_use_when_nothing_was_chosen() -> None:
    line = [sys.executable, "-c", "from blobstore import kernels; print(kernels.active().name)"]
    assert subprocess.run(line, capture_output=True, text=True, check=True, timeout=100).stdout == "native\n"


def test_an_unknown_kernel_is_a_usage_error_and_changes_nothing() -> None:
    kernels.use("reference")
    with pytest.raises(UsageError, match="unknown kernel 'nope'"):
        kernels.use("nope")
    assert kernels.active() is TWIN


@pytest.mark.parametrize(
    ("weights", "bits", "group_size", "words", "scales", "biases"),
    [
        (64, 4, 32, 7, 2, 2),
        (64, 4, 32, 8, 1, 2),
        (64, 4, 32, 8, 2, 3),
        (63, 4, 32, 7, 1, 1),
        (64, 8, 32, 8, 2, 2),
        (64, 5, 32, 8, 2, 2),
        (64, 4, 0, 8, 2, 2),
        (64, 4, 4, 8, 16, 16),
    ],
)
def test_native_affine_refuses_arrays_whose_lengths_do_not_fit(
    weights: int, bits: int, group_size: int, words: int, scales: int, biases: int
) -> None:
    values, *parts = (np.zeros(count, np.uint32) for count in (weights, words, scales, biases))
    with pytest.raises(ValueError, match=r"wrong length|whole number|neither 4 nor 8"):
        _native.quantize_affine_f32(values, bits, group_size, *parts)
    with pytest.raises(ValueError, match=r"wrong length|whole number|neither 4 nor 8"):
        _native.dequantize_affine_f32(*parts, bits, group_size, values.view(np.float32))


@pytest.mark.parametrize(
    ("quant_type", "weights", "words", "scales"),
    [
        ("nvfp4", 64, 8, 2),
        ("nvfp4", 64, 16, 4),
        ("mxfp4", 64, 8, 4),
        ("mxfp8", 64, 8, 2),
        ("mxfp8", 48, 12, 1),
        ("fp4", 64, 8, 2),
    ],
)
def test_native_fp_refuses_arrays_whose_lengths_do_not_fit(quant_type: str, weights: int, words: int, scales: int) -> None:
    values, *parts = np.zeros(weights, np.uint32), np.zeros(words, np.uint32), np.zeros(scales, np.uint8)
    with pytest.raises(ValueError, match=r"wrong length|whole number|unknown type"):
        _native.quantize_fp_f32(values, quant_type, *parts)
    with pytest.raises(ValueError, match=r"wrong length|whole number|unknown type"):
        _native.dequantize_fp(*parts, quant_type, 1.0, values.view(np.float32))


@pytest.mark.parametrize(
    "weights",
    [
        np.zeros(64, np.float32),
        np.zeros(64, np.uint16),
        np.zeros(128, np.uint32)[::2],
        np.zeros((2, 32), np.uint32),
    ],
    ids=["other type", "other width", "strided", "rank 2"],
)
def test_native_converts_no_array_silently(weights: Array) -> None:
    with pytest.raises(TypeError):
        _native.quantize_fp_f32(weights, "mxfp4", np.zeros(8, np.uint32), np.zeros(2, np.uint8))


def test_threads_at_work_on_the_same_array_do_not_disturb_each_other() -> None:
    weights = random_weights(BF16, 256, 1280)
    expected = {name: kernels.quantize(weights, name, kernel=TWIN) for name in ("int4", "nvfp4", "mxfp8")}
    names = [*expected] * 8
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda name: kernels.quantize(weights, name), names))
    for name, quantized in zip(names, results, strict=True):
        assert_same_parts(quantized, expected[name])
