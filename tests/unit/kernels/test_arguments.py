"""Any argument of `quantize` and `dequantize` gives a typed error or the right result."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.lib.stride_tricks import as_strided
from support.weights import BF16, DTYPES, F32, assert_same_parts, random_weights, raw

import blobstore
from blobstore import QuantizedArray
from blobstore.errors import BlobStoreError, UsageError
from blobstore.formats.quant import Quantization, QuantType

Array = np.ndarray[Any, Any]

WEIGHTS = random_weights(F32, 4, 64)
INT4, NVFP4 = (
    blobstore.quantize(WEIGHTS, "int4"),
    blobstore.quantize(WEIGHTS, "nvfp4", global_scale=True),
)


class Unreadable:
    """What fails when it is asked for its array."""

    def __array__(self, *_: object, **__: object) -> Array:
        raise RuntimeError("no array")


MASKED = np.ma.masked_less(WEIGHTS, 0)
NO_ARRAYS: dict[str, Any] = {
    "rows of different lengths": [[1.0], [1.0, 2.0]],
    "a string": "weights",
    "bytes": bytes(256),
    "a dictionary": {},
    "None": None,
    "a number": 3,
    "unreadable": Unreadable(),
    "bfloat16 of PyTorch": torch.ones(2, 64, dtype=torch.bfloat16),
    "with a gradient": torch.ones(2, 64, requires_grad=True),
    "on no device": torch.ones(2, 64, device="meta"),
    "sparse": torch.ones(2, 64).to_sparse(),
    "bfloat16 of MLX": mx.ones((2, 64), dtype=mx.bfloat16),
    "masked": MASKED,
    "objects": np.full((4, 64), None),
    "strings": np.full((4, 64), "1", np.dtypes.StringDType()),
    "structures": np.zeros((4, 64), [("a", "f4")]),
    "dates": np.zeros((4, 64), "M8[s]"),
    "4-bit floats": np.ones((4, 64), ml_dtypes.float4_e2m1fn),
}

any_of_no_array = pytest.mark.parametrize("given", NO_ARRAYS.values(), ids=NO_ARRAYS)


def laid_out() -> dict[str, Array]:
    """Return the weights in memory as callers may have them: each equal to `WEIGHTS`."""
    odd = np.frombuffer(b"." + WEIGHTS.tobytes(), np.uint8)[1:].view(F32).reshape(WEIGHTS.shape)
    wide = np.zeros((8, 128), F32)
    wide[::2, ::2] = WEIGHTS
    return {
        "read-only at an odd address": odd,
        "by columns": np.asfortranarray(WEIGHTS),
        "negative strides": WEIGHTS[::-1, ::-1].copy()[::-1, ::-1],
        "every second value": wide[::2, ::2],
        "big-endian": WEIGHTS.astype(">f4"),
        "a matrix": WEIGHTS.view(np.matrix),
        "masked without a masked value": np.ma.masked_array(WEIGHTS),
    }


@pytest.mark.parametrize("layout", laid_out())
@pytest.mark.parametrize("options", [{}, {"jobs": 3}, {"method": "search"}], ids=str)
def test_the_layout_of_an_array_does_not_change_its_bits(
    layout: str, options: dict[str, Any]
) -> None:
    for quant_type in ("int4", "nvfp4"):
        expected = blobstore.quantize(WEIGHTS, quant_type, **options)
        assert_same_parts(
            blobstore.quantize(laid_out()[layout], quant_type, **options), expected, layout
        )


@pytest.mark.parametrize(
    "array",
    [
        as_strided(np.zeros(1, F32), (0, 64), (2**40, 2**40)),
        as_strided(np.zeros(1, F32), (0, 2**40), (2**40, 4)),
        np.zeros((4, 0), F32),
        np.zeros((0, 2**20, 64), F32),
    ],
    ids=lambda array: str(array.shape),
)
def test_an_empty_array_may_have_any_strides(array: Array) -> None:
    quantized = blobstore.quantize(array, "int4")
    assert quantized.shape == array.shape
    assert blobstore.dequantize(quantized).shape == array.shape


def test_a_row_of_an_array_with_a_stride_of_a_terabyte() -> None:
    row = as_strided(WEIGHTS, (1, 64), (2**40, 4))
    assert_same_parts(blobstore.quantize(row, "int4"), blobstore.quantize(WEIGHTS[:1], "int4"))


@any_of_no_array
def test_what_is_not_an_array_of_numbers_is_refused(given: Any) -> None:
    several: dict[str, Any] = {"method": "search", "jobs": 2}
    for options in ({}, several):
        with pytest.raises(BlobStoreError):
            blobstore.quantize(given, "nvfp4", **options)
    if given is None:
        return  # no importance
    with pytest.raises(UsageError, match="importance"):
        blobstore.quantize(WEIGHTS, "int4", method="search", importance=given)


@any_of_no_array
@pytest.mark.parametrize("part", ["weight", "scale", "bias", "global_scale", "quantization"])
@pytest.mark.parametrize("whole", [INT4, NVFP4], ids=["int4", "nvfp4"])
def test_parts_that_are_not_arrays_of_the_type_are_refused(
    whole: QuantizedArray[Array], part: str, given: Any
) -> None:
    if given is None and getattr(whole, part) is None:
        return
    if given is None and part == "global_scale":
        return  # it is optional
    with pytest.raises(BlobStoreError):
        blobstore.dequantize(replace(whole, **{part: given}))


@pytest.mark.parametrize(
    "given",
    [None, 3, "int4", WEIGHTS, (INT4.weight, INT4.scale)],
    ids=lambda given: type(given).__name__,
)
def test_what_is_not_quantized_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="is not a QuantizedArray"):
        blobstore.dequantize(given)


@pytest.mark.parametrize(
    "given", [None, 4, b"int4", ["int4"], QuantType, INT4.quantization], ids=repr
)
def test_a_type_that_is_not_a_word_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="unknown quantization type"):
        blobstore.quantize(WEIGHTS, given)


@pytest.mark.parametrize(
    "given", [None, 4, b"float32", ["float32"], np.float32, np.dtype("f4")], ids=repr
)
def test_a_dtype_that_is_not_a_word_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="unknown dtype"):
        blobstore.dequantize(INT4, given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_scale": np.array([1, 2])}, "global_scale is"),
        ({"global_scale": 1}, "global_scale is 1"),
        ({"method": np.array(["minmax"])}, "unknown quantization method"),
        ({"method": ["search"]}, "unknown quantization method"),
        ({"kernel": "plain"}, "'plain' is not a kernel"),
        ({"kernel": 1}, "1 is not a kernel"),
    ],
    ids=str,
)
def test_an_option_of_another_type_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        blobstore.quantize(WEIGHTS, "nvfp4", **options)


@pytest.mark.parametrize(
    ("quant_type", "group_size"),
    [("int4", 32), ("int4", 128), ("int8", 64), ("nvfp4", 16), ("mxfp8", 32)],
)
def test_parts_whose_groups_do_not_divide_their_rows_are_refused(
    quant_type: str, group_size: int
) -> None:
    quantization = Quantization(QuantType(quant_type), group_size)
    words = group_size * quantization.quant_type.bits // 32
    for cols in set(range(3 * words)) - {0, words, 2 * words}:
        for groups in {cols // words, -(-cols // words)}:
            scale = np.ones((2, groups), F32 if quantization.quant_type.is_affine else np.uint8)
            bias = scale if quantization.quant_type.is_affine else None
            parts = QuantizedArray(np.zeros((2, cols), np.uint32), scale, bias, None, quantization)
            with pytest.raises(UsageError, match=f"groups of {group_size} do not divide"):
                blobstore.dequantize(parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_may_be_big_endian_matrices_or_views(dtype: Any) -> None:
    parts = blobstore.quantize(random_weights(dtype, 4, 64), "int4")
    expected = raw(blobstore.dequantize(parts))
    for change in (
        lambda part: part.view(np.matrix),
        np.asfortranarray,
        lambda part: part[::-1].copy()[::-1],
    ):
        weight, scale, bias = (change(part) for part in (parts.weight, parts.scale, parts.bias))
        changed = QuantizedArray(weight, scale, bias, None, parts.quantization)
        np.testing.assert_array_equal(raw(blobstore.dequantize(changed)), expected)
    if dtype != BF16:  # ml_dtypes has no byte order
        scale, bias = (
            np.asarray(part).astype(np.asarray(part).dtype.newbyteorder(">"))
            for part in (parts.scale, parts.bias)
        )
        changed = QuantizedArray(parts.weight.astype(">u4"), scale, bias, None, parts.quantization)
        np.testing.assert_array_equal(raw(blobstore.dequantize(changed)), expected)


shapes: st.SearchStrategy[tuple[int, ...]] = st.lists(
    st.sampled_from([0, 1, 2, 7, 8, 16, 32, 64]), max_size=3
).map(tuple)
dtypes: st.SearchStrategy[Any] = st.sampled_from(
    ["u1", "u4", ">u4", "i4", "f2", ">f2", "f4", ">f4", "f8", "c8", "?", "O", "U1", BF16]
)
steps = st.sampled_from([1, 2, -1, -2])


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Return an array of ones of any dtype, shape and order; some can't be written to."""
    array: Array = np.ones([2 * size for size in draw(shapes)], draw(dtypes))
    index: Any = (..., *(slice(None, None, draw(steps)) for _ in array.shape))
    array = array[index]
    array = array.T if draw(st.booleans()) else array
    array.flags.writeable = draw(st.booleans())
    return array


def ends_well(call: Any) -> None:
    """Call, and accept a typed error."""
    with suppress(BlobStoreError):
        call()


quant_types = st.sampled_from([member.value for member in QuantType])


@given(
    arrays(),
    quant_types,
    st.sampled_from([None, 16, 32, 64]),
    st.sampled_from(["minmax", "search"]),
    st.integers(0, 3),
)
def test_any_array_is_quantized_or_refused(
    array: Array, quant_type: str, group_size: int | None, method: str, jobs: int
) -> None:
    ends_well(
        lambda: blobstore.quantize(
            array, quant_type, group_size=group_size, method=method, jobs=jobs
        )
    )


@given(
    arrays(), arrays(), st.one_of(st.none(), arrays()), st.one_of(st.none(), arrays()), quant_types
)
def test_any_parts_are_dequantized_or_refused(
    weight: Array, scale: Array, bias: Array | None, factor: Array | None, quant_type: str
) -> None:
    quantization = blobstore.kernels.quantization_of(quant_type)
    ends_well(
        lambda: blobstore.dequantize(QuantizedArray(weight, scale, bias, factor, quantization))
    )
