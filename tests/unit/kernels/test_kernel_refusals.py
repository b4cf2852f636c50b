"""What can't be quantized is refused with an error that says what was given.

Odd layouts and empty arrays are accepted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.weights import (
    BF16,
    DTYPES,
    EVERY,
    F32,
    TARGETS,
    TWIN,
    assert_same_parts,
    parts_of,
    random_importance,
    random_weights,
    squared_errors,
)

from blobstore import kernels
from blobstore.errors import NonFiniteWeightError, UnsupportedSourceError, UsageError
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]

TYPES = ("int4", "int8", "nvfp4", "mxfp4", "mxfp8")

any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
any_type = pytest.mark.parametrize("quant_type", TYPES)
any_form = pytest.mark.parametrize(("quant_type", "group_size"), EVERY)
any_method = pytest.mark.parametrize("method", kernels.METHODS)
any_kernel = pytest.mark.parametrize(
    "kernel", [*TARGETS.values(), TWIN], ids=lambda kernel: kernel.name
)


@any_method
@any_kernel
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@any_dtype
@any_type
def test_a_non_finite_weight_is_an_error_with_the_index_of_the_first(
    quant_type: str, dtype: np.dtype[Any], bad: float, kernel: kernels.Kernel, method: str
) -> None:
    weights = random_weights(dtype, 2, 3, 64)
    weights[1, 0, 63] = weights[1, 2, 0] = weights[1, 0, 62] = bad
    with pytest.raises(NonFiniteWeightError, match=r"\[1, 0, 62\] is -?(nan|inf)") as caught:
        kernels.quantize(weights, quant_type, kernel=kernel, method=method)
    assert caught.value.index == (1, 0, 62)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_a_non_finite_weight_is_the_same_error_with_a_global_scale(bad: float) -> None:
    weights = random_weights(BF16, 4, 64)
    weights[2, 9] = bad
    with pytest.raises(NonFiniteWeightError, match=r"\[2, 9\]") as caught:
        kernels.quantize(weights, "nvfp4", global_scale=True)
    assert caught.value.index == (2, 9)


@any_method
@pytest.mark.parametrize("count", [1, 8, 15, 16, 17, 40])
@any_kernel
def test_a_non_finite_weight_is_found_in_whole_blocks_and_in_single_groups(
    kernel: kernels.Kernel, count: int, method: str
) -> None:
    for group in range(count):
        weights = np.ones((count, 32), BF16)
        weights[group, 31] = np.nan
        with pytest.raises(NonFiniteWeightError) as caught:
            kernels.quantize(weights, "mxfp4", kernel=kernel, method=method)
        assert caught.value.index == (group, 31)


@pytest.mark.parametrize("index", [(0, 0), (0, 63), (31, 0), (31, 63)], ids=str)
def test_the_index_of_a_non_finite_weight_is_the_caller_s_and_not_the_copy_s(
    index: tuple[int, int],
) -> None:
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
        ([[1.0] * 64], "F64"),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else "",
)
@any_method
@pytest.mark.parametrize("quant_type", ["int4", "mxfp8"])
def test_an_array_that_cannot_be_quantized_is_a_usage_error(
    quant_type: str, array: Any, message: str, method: str
) -> None:
    with pytest.raises(UsageError, match=message):
        kernels.quantize(array, quant_type, method=method)


@pytest.mark.parametrize(
    "array",
    [np.full((2, 64), "1"), np.full((2, 64), None), np.ones((2, 64), np.complex128), None],
    ids=["str", "object", "complex", "None"],
)
def test_an_array_of_a_dtype_that_safetensors_has_not_is_an_unsupported_source(array: Any) -> None:
    with pytest.raises(UnsupportedSourceError, match="safetensors has no dtype"):
        kernels.quantize(array, "int4")


@pytest.mark.parametrize(
    ("quant_type", "group_size"),
    [
        *(
            (quant_type, size)
            for quant_type in ("int4", "int8")
            for size in (48, 16, 256, 0, -32, 32.0, True, "32")
        ),
        *(("nvfp4", size) for size in (32, 64)),
        *((quant_type, size) for quant_type in ("mxfp4", "mxfp8") for size in (16, 64)),
    ],
)
def test_a_group_size_that_the_type_does_not_have_is_a_usage_error(
    quant_type: str, group_size: Any
) -> None:
    with pytest.raises(UsageError, match=f"{quant_type} has no groups of {group_size!r}"):
        kernels.quantize(np.ones((2, 768), np.float32), quant_type, group_size=group_size)


@pytest.mark.parametrize("quant_type", ["int3", "", "q6", "int4 ", "affine"])
def test_an_unknown_type_is_a_usage_error(quant_type: str) -> None:
    with pytest.raises(UsageError, match="unknown quantization type"):
        kernels.quantize(np.ones((2, 64), np.float32), quant_type)


@pytest.mark.parametrize("method", ["nope", "", "Search", None, 1])
def test_an_unknown_method_is_a_usage_error(method: Any) -> None:
    with pytest.raises(UsageError, match=f"unknown quantization method {method!r}"):
        kernels.quantize(np.ones((2, 64), np.float32), "int4", method=method)


@pytest.mark.parametrize("jobs", [0, -1, True, 2.0, "2", None, np.int64(2)], ids=repr)
@any_method
def test_jobs_that_are_no_whole_number_of_threads_are_a_usage_error(method: str, jobs: Any) -> None:
    with pytest.raises(UsageError, match=r"jobs is .* whole number of threads"):
        kernels.quantize(np.ones((2, 64), np.float32), "int4", method=method, jobs=jobs)


@any_method
@pytest.mark.parametrize("quant_type", ["int4", "int8", "mxfp4", "mxfp8"])
def test_a_global_scale_for_another_type_than_nvfp4_is_a_usage_error(
    quant_type: str, method: str
) -> None:
    with pytest.raises(UsageError, match=f"only nvfp4 has a global scale, not {quant_type}"):
        kernels.quantize(np.ones((2, 64), np.float32), quant_type, method=method, global_scale=True)


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (np.ones(63), "63 values for 64 columns"),
        (np.ones(65), "65 values for 64 columns"),
        (np.ones(0), "0 values for 64 columns"),
        (np.ones((1, 64)), r"of shape \[1, 64\], not a vector"),
        (np.ones((64, 1)), r"of shape \[64, 1\], not a vector"),
        (1.0, r"of shape \[\], not a vector"),
        (-np.eye(1, 64, 7)[0], r"column 7 is -1.0: it must be finite and at least 0"),
        (np.where(np.arange(64) == 9, np.nan, 1), r"column 9 is nan"),
        (np.where(np.arange(64) == 63, np.inf, 1), r"column 63 is inf"),
        (np.where(np.arange(64) == 0, -np.inf, 1), r"column 0 is -inf"),
        (np.full(64, "1"), "not a vector of floats"),
        (np.full(64, 1, object), "not a vector of floats"),
        (np.full(64, 1j), "complex128"),
        (np.ones(64, bool), "bool"),
        (["1"] * 64, "not a vector of floats"),
        ([None] * 64, "not a vector of floats"),
        (np.zeros(64, "V4"), "not a vector of floats"),
        (np.zeros(64, [("a", "f4")]), "not a vector of floats"),
        ([[1.0, 2.0], [3.0]], "importance is a list that numpy can't read as an array"),
        (np.zeros(64, "datetime64[s]"), "not a vector of floats"),
    ],
)
@pytest.mark.parametrize("quant_type", ["int4", "nvfp4"])
def test_importance_that_is_no_vector_of_finite_numbers_at_least_0_is_a_usage_error(
    quant_type: str, importance: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        kernels.quantize(
            np.ones((2, 64), np.float32), quant_type, method="search", importance=importance
        )


@pytest.mark.parametrize("exponent", [200, -200])
def test_of_importance_beyond_float32_only_the_ratios_count(exponent: int) -> None:
    weights, importance = random_weights(BF16, 8, 64), random_importance(64)
    expected = kernels.quantize(weights, "int4", method="search", importance=importance)
    scaled = np.ldexp(importance.astype(np.float64), exponent)
    assert_same_parts(
        kernels.quantize(weights, "int4", method="search", importance=scaled), expected
    )


@any_type
def test_importance_without_a_search_is_a_usage_error(quant_type: str) -> None:
    with pytest.raises(UsageError, match="importance needs the method search"):
        kernels.quantize(np.ones((2, 64), np.float32), quant_type, importance=np.ones(64))


@pytest.mark.parametrize(
    "kind",
    [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.int32, np.uint8, ">f4", list],
)
def test_importance_may_have_any_real_number_type(kind: Any) -> None:
    weights = random_weights(BF16, 8, 64)
    values = np.arange(64) % 5
    expected = kernels.quantize(
        weights, "int4", method="search", importance=values.astype(np.float32)
    )
    importance: Any = values.tolist() if kind is list else values.astype(kind)
    assert_same_parts(
        kernels.quantize(weights, "int4", method="search", importance=importance), expected
    )


def test_affine_parts_without_a_bias_are_a_usage_error() -> None:
    quantized = kernels.quantize(np.ones((2, 64), np.float32), "int4")
    with pytest.raises(UsageError, match="do not fit"):
        kernels.dequantize(
            QuantizedArray(quantized.weight, quantized.scale, None, None, quantized.quantization)
        )


@pytest.mark.parametrize("dtype", ["float64", "int8", "", "uint32"])
def test_values_of_another_dtype_are_a_usage_error(dtype: str) -> None:
    with pytest.raises(UsageError, match=r"dtype|values can be"):
        kernels.dequantize(kernels.quantize(np.ones((2, 64), np.float32), "int4"), dtype)


@any_method
@any_dtype
@any_form
def test_an_array_of_another_layout_is_its_contiguous_copy(
    quant_type: str, group_size: int, dtype: np.dtype[Any], method: str
) -> None:
    square = random_weights(dtype, 256, 256)
    octets = np.frombuffer(b"\0" + square.tobytes(), np.uint8)[1:]
    misaligned = np.ndarray(square.shape, dtype, octets)
    layouts = [
        square.T,
        square[::-3, ::2],
        square[:, ::-1],
        square.reshape(2, 128, 256).swapaxes(0, 1),
        misaligned,
    ]
    if dtype != BF16:  # ml_dtypes has no other byte order
        layouts.append(square.astype(dtype.newbyteorder(">")))
    for view in layouts:
        options: dict[str, Any] = {"group_size": group_size, "method": method, "jobs": 3}
        copy = kernels.quantize(np.array(view, dtype, order="C"), quant_type, **options)
        assert_same_parts(kernels.quantize(view, quant_type, **options), copy)
    assert not misaligned.flags.aligned


@any_method
@any_dtype
@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (0, 0), (2, 0, 256), (0, 3, 0)], ids=str)
@any_form
def test_empty_arrays_are_quantized_to_empty_parts(
    quant_type: str, group_size: int, shape: tuple[int, ...], dtype: np.dtype[Any], method: str
) -> None:
    vectors = (None, np.ones(shape[-1]), np.zeros(shape[-1])) if method == "search" else (None,)
    for importance in vectors:
        for kernel in (*TARGETS.values(), TWIN):
            options: dict[str, Any] = {
                "group_size": group_size,
                "method": method,
                "importance": importance,
                "kernel": kernel,
            }
            for jobs in (1, 3):
                quantized = kernels.quantize(
                    np.zeros(shape, dtype), quant_type, jobs=jobs, **options
                )
                assert all(part.size == 0 for part in parts_of(quantized))
                assert kernels.dequantize(quantized, "bfloat16", kernel=kernel).shape == shape


@any_method
@pytest.mark.parametrize("shape", [(0, 64), (3, 0)], ids=str)
def test_an_empty_array_has_a_global_scale_of_1(shape: tuple[int, ...], method: str) -> None:
    quantized = kernels.quantize(
        np.zeros(shape, np.float32), "nvfp4", method=method, global_scale=True
    )
    assert quantized.global_scale is not None
    assert quantized.global_scale.tolist() == [1]
    assert kernels.dequantize(quantized).shape == shape


@any_form
def test_importance_of_0_everywhere_gives_what_minmax_gives(
    quant_type: str, group_size: int
) -> None:
    weights = random_weights(F32, 24, 128)
    found = kernels.quantize(
        weights, quant_type, group_size=group_size, method="search", importance=np.zeros(128)
    )
    assert_same_parts(found, kernels.quantize(weights, quant_type, group_size=group_size))
    importance = random_importance(128)
    importance[:group_size] = 0  # all of a group's columns, and others count
    found = kernels.quantize(
        weights, quant_type, group_size=group_size, method="search", importance=importance
    )
    plain = kernels.quantize(weights, quant_type, group_size=group_size)
    np.testing.assert_array_equal(found.scale[:, 0], plain.scale[:, 0])
    errors, plain_errors = squared_errors(weights, found), squared_errors(weights, plain)
    np.testing.assert_array_equal(errors.reshape(24, -1)[:, 0], plain_errors.reshape(24, -1)[:, 0])


@pytest.mark.parametrize("quant_type", ["int4", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("factor", [[], [2.0, 3.0], [[2.0]]], ids=str)
def test_a_global_scale_of_wrong_shape_or_type_is_a_usage_error(
    quant_type: str, factor: Any
) -> None:
    quantized = kernels.quantize(np.ones((2, 64), np.float32), quant_type)
    with pytest.raises(UsageError, match="do not fit"):
        kernels.dequantize(replace(quantized, global_scale=np.array(factor, np.float32)))
    if quant_type != "nvfp4":
        for one in (2, [2]):
            with pytest.raises(UsageError, match="do not fit"):
                kernels.dequantize(replace(quantized, global_scale=np.array(one, np.float32)))


def test_a_global_scale_may_be_a_scalar() -> None:
    """Programs that quantize store either form, and it is kept as it is."""
    quantized = kernels.quantize(np.ones((2, 64), np.float32), "nvfp4")
    scalar, vector = (
        kernels.dequantize(replace(quantized, global_scale=np.array(two, np.float32)))
        for two in (2, [2])
    )
    np.testing.assert_array_equal(scalar, vector)


def test_a_misspelt_method_is_said_to_be_one() -> None:
    with pytest.raises(UsageError, match="unknown quantization method 'serach'"):
        kernels.quantize(
            np.ones((2, 64), np.float32), "int4", method="serach", importance=np.ones(64)
        )
