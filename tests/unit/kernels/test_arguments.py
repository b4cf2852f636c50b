"""Any argument of `quantize` and `dequantize` gives a typed error or the right result."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.lib.stride_tricks import as_strided
from support.weights import BF16, DTYPES, F32, KERNELS, assert_same_parts, random_weights

import blobstore
from blobstore import QuantizedArray, errors
from blobstore.formats.dtypes import QuantType

Array = np.ndarray[Any, Any]

WEIGHTS = random_weights(F32, 4, 64)
INT4 = blobstore.quantize(WEIGHTS, "int4")
NVFP4 = blobstore.quantize(WEIGHTS, "nvfp4", global_scale=True)
TYPES = [member.value for member in QuantType]

NO_ARRAYS: dict[str, Any] = {
    "rows of different lengths": [[1.0], [1.0, 2.0]],
    "a string": "weights",
    "bfloat16 of PyTorch": torch.ones(2, 64, dtype=torch.bfloat16),
    "on no device": torch.ones(2, 64, device="meta"),
    "bfloat16 of MLX": mx.ones((2, 64), dtype=mx.bfloat16),
    "masked": np.ma.masked_less(WEIGHTS, 0),
    "objects": np.full((4, 64), None),
    "4-bit floats": np.ones((4, 64), ml_dtypes.float4_e2m1fn),
}


@pytest.mark.parametrize("given", NO_ARRAYS.values(), ids=NO_ARRAYS)
def test_what_is_not_an_array_of_numbers_is_refused(given: Any) -> None:
    with pytest.raises(errors.BlobStoreError):
        blobstore.quantize(given, "nvfp4", method="search", jobs=2)
    with pytest.raises(errors.UsageError, match="importance"):
        blobstore.quantize(WEIGHTS, "int4", method="search", importance=given)
    for whole in (INT4, NVFP4):
        for part in ("weight", "scale", "bias", "global_scale", "quantization"):
            with pytest.raises(errors.BlobStoreError):
                blobstore.dequantize(replace(whole, **{part: given}))
    with pytest.raises(errors.UsageError, match="QuantizedArray"):
        blobstore.dequantize(given)


def test_arrays_may_have_any_strides() -> None:
    far = as_strided(np.zeros(1, F32), (0, 64), (2**40, 2**40))
    for array in (far, np.zeros((4, 0), F32), np.zeros((0, 2**20, 64), F32)):
        quantized = blobstore.quantize(array, "int4")
        assert quantized.shape == array.shape
        assert blobstore.dequantize(quantized).shape == array.shape
    row = as_strided(WEIGHTS, (1, 64), (2**40, 4))
    assert_same_parts(blobstore.quantize(row, "int4"), blobstore.quantize(WEIGHTS[:1], "int4"))


@pytest.mark.parametrize("quant_type", TYPES)
def test_the_index_of_the_first_non_finite_weight_is_said(quant_type: str) -> None:
    for kernel in KERNELS:
        for dtype, bad in zip(DTYPES, (np.nan, np.inf, -np.inf), strict=True):
            weights = random_weights(dtype, 2, 3, 64)
            weights[1, 0, 63] = weights[1, 2, 0] = weights[1, 0, 62] = bad
            for options in ({}, {"method": "search"}, {"jobs": 3}):
                with pytest.raises(
                    errors.NonFiniteWeightError, match=r"\[1, 0, 62\] is -?(nan|inf)"
                ) as e:
                    blobstore.quantize(weights, quant_type, kernel=kernel, **options)
                assert e.value.index == (1, 0, 62)


ONES = np.ones((2, 64), np.float32)
SEARCH = {"method": "search"}
REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (np.ones(64, np.float32), "int4", {}, "rank 2"),
    (np.ones((2, 64), np.float64), "mxfp8", {}, "F64"),
    (np.ones((2, 72), np.float32), "int4", {}, "groups of 32"),
    (ONES, "int3", {}, "int3"),
    (ONES, "int4", {"method": "serach"}, "serach"),
    (ONES, "int4", {"method": ["search"]}, "method"),
    (ONES, "int4", {"importance": np.ones(64)}, "importance"),
    (ONES, "int4", {"jobs": 0}, "jobs is 0"),
    (ONES, "mxfp8", {"global_scale": True}, "mxfp8"),
    (ONES, "nvfp4", {"global_scale": 1}, "global_scale is 1"),
    (ONES, "int4", {"kernel": "plain"}, "plain"),
    (ONES, "int4", {"group_size": 48}, "48"),
    (ONES, "nvfp4", {"group_size": 32}, "32"),
    (ONES, "int4", {**SEARCH, "importance": np.ones(63)}, "63 values for 64"),
    (ONES, "int4", {**SEARCH, "importance": np.ones((1, 64))}, r"\[1, 64\]"),
    (ONES, "int4", {**SEARCH, "importance": -np.eye(1, 64, 7)[0]}, "column 7 is -1.0"),
    (ONES, "int4", {**SEARCH, "importance": np.full(64, np.nan)}, "column 0 is nan"),
    (ONES, "int4", {**SEARCH, "importance": np.full(64, 1j)}, "complex128"),
]


def test_what_can_not_be_quantized_is_a_usage_error() -> None:
    for array, quant_type, options, says in REFUSED:
        with pytest.raises(errors.UsageError, match=says):
            blobstore.quantize(array, quant_type, **options)


def test_unknown_dtypes_of_weights_and_values() -> None:
    for array in (np.full((2, 64), "1"), np.ones((2, 64), np.complex128)):
        with pytest.raises(errors.UnsupportedSourceError, match="safetensors"):
            blobstore.quantize(array, "int4")
    dtypes: list[Any] = [None, np.float32, "float64", ""]
    for dtype in dtypes:
        with pytest.raises(errors.UsageError, match=r"dtype|values"):
            blobstore.dequantize(INT4, dtype)


def test_parts_that_do_not_fit_each_other_are_a_usage_error() -> None:
    wrong: list[tuple[QuantizedArray[Array], dict[str, Any], str]] = [
        (INT4, {"bias": None}, "do not fit"),
        (INT4, {"bias": np.asarray(INT4.bias)[:, :1]}, "do not fit"),
        (INT4, {"global_scale": np.ones(1, np.float32)}, "do not fit"),
        (NVFP4, {"bias": NVFP4.scale}, "do not fit"),
        (NVFP4, {"global_scale": np.ones((1, 1), np.float32)}, "do not fit"),
        (NVFP4, {"weight": NVFP4.weight[:, :5], "scale": NVFP4.scale[:, :2]}, "groups of 16"),
        (NVFP4, {"weight": NVFP4.weight[:, :1], "scale": NVFP4.scale[:, :0]}, "groups of 16"),
    ]
    for whole, changes, says in wrong:
        with pytest.raises(errors.UsageError, match=says):
            blobstore.dequantize(replace(whole, **changes))


SIZES = st.sampled_from([0, 1, 2, 7, 8, 16, 32, 64])
NUMBERS: list[Any] = ["u1", "u4", ">u4", "i4", "f2", ">f2", "f4", ">f4", "f8", "c8", "?", "O", BF16]


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Return an array of ones of any dtype, shape and order; some can't be written to."""
    shape = draw(st.lists(SIZES, max_size=3))
    array: Array = np.ones([2 * size for size in shape], draw(st.sampled_from(NUMBERS)))
    index: Any = (..., *(slice(None, None, draw(st.sampled_from([1, 2, -1]))) for _ in shape))
    array = array[index]
    array = array.T if draw(st.booleans()) else array
    array.flags.writeable = draw(st.booleans())
    return array


@settings(max_examples=40)
@given(arrays(), arrays(), st.none() | arrays(), st.none() | arrays(), st.sampled_from(TYPES))
def test_any_arrays_are_quantized_and_dequantized_or_refused(
    array: Array, scale: Array, bias: Array | None, factor: Array | None, quant_type: str
) -> None:
    with suppress(errors.BlobStoreError):
        blobstore.quantize(array, quant_type, method="search", jobs=2)
    quantization = blobstore.kernels.quantization_of(quant_type)
    with suppress(errors.BlobStoreError):
        blobstore.dequantize(QuantizedArray(array, scale, bias, factor, quantization))
