"""What callers rely on of `quantize` and `dequantize`: shapes, layouts, rows, jobs and threads."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from support.weights import (
    BF16,
    DTYPES,
    EVERY,
    F32,
    assert_same_parts,
    parts_of,
    random_importance,
    random_weights,
    raw,
)

from blobstore import kernels
from blobstore.formats.quant import Quantization, QuantType
from blobstore.kernels.arrays import QuantizedArray, map_parts

Array = np.ndarray[Any, Any]

TYPES = [member.value for member in QuantType]
SHAPES = [(6, 256), (1, 2, 3, 128), (0, 256), (3, 0), (2, 0, 256)]

any_form = pytest.mark.parametrize(("quant_type", "group_size"), EVERY)
any_type = pytest.mark.parametrize("quant_type", TYPES)


@any_form
def test_parts_have_the_shapes_and_dtypes_of_the_table(quant_type: str, group_size: int) -> None:
    is_affine = quant_type.startswith("int")
    for shape, dtype in product(SHAPES, DTYPES):
        weights = random_weights(dtype, *shape)
        quantized = kernels.quantize(weights, quant_type, group_size=group_size)
        words = (*shape[:-1], shape[-1] * quantized.quant_type.bits // 32)
        scales = (*shape[:-1], shape[-1] // group_size), dtype if is_affine else np.uint8
        assert (quantized.weight.shape, quantized.weight.dtype) == (words, np.uint32)
        assert (quantized.scale.shape, quantized.scale.dtype) == scales
        assert (quantized.bias is not None) == is_affine
        assert quantized.bias is None or (quantized.bias.shape, quantized.bias.dtype) == scales
        assert quantized.global_scale is None
        values = kernels.dequantize(quantized, "bfloat16")
        assert (values.shape, values.dtype) == (shape, BF16)


def test_names_mean_the_types_that_ollama_means() -> None:
    names = {"q4": ("int4", 32), "fp4": ("int4", 32), "q8": ("int8", 64), "fp8": ("int8", 64)}
    names |= {"NVFP4": ("nvfp4", 16), "mxfp4": ("mxfp4", 32), "mxfp8": ("mxfp8", 32)}
    for name, (quant_type, group_size) in names.items():
        found = kernels.quantization_of(name)
        assert found == Quantization(QuantType(quant_type), group_size)


@any_form
def test_results_do_not_depend_on_how_rows_are_cut_or_shared(
    quant_type: str, group_size: int
) -> None:
    weights = random_weights(BF16, 21, 256)
    searched = {"method": "search", "importance": random_importance(256)}
    choices: list[dict[str, Any]] = [{}, searched]
    for options in choices:

        def quantized(rows: Array, jobs: int = 1) -> QuantizedArray[Array]:
            return kernels.quantize(rows, quant_type, group_size=group_size, jobs=jobs, **options)  # noqa: B023  # called before the next turn

        whole = quantized(weights)
        for jobs in (2, 7, 10**4):
            assert_same_parts(quantized(weights, jobs), whole, f"{jobs} jobs")
        assert_same_parts(quantized(weights[:1], 10**4), quantized(weights[:1]), "1 row")
        pieces = [quantized(rows) for rows in np.split(weights, [1, 5, 6])]
        for part, *cut in zip(parts_of(whole), *map(parts_of, pieces), strict=True):
            np.testing.assert_array_equal(raw(part), raw(np.concatenate(cut)))
        stacked = quantized(weights[:12].reshape(2, 3, 2, 256))
        for part, expected in zip(parts_of(stacked), parts_of(whole), strict=True):
            np.testing.assert_array_equal(raw(part).reshape(12, -1), raw(expected)[:12])


@any_type
def test_an_array_of_another_layout_is_its_contiguous_copy(quant_type: str) -> None:
    for dtype, method in ((BF16, "minmax"), (F32, "search")):
        square = random_weights(dtype, 128, 128)
        octets = np.frombuffer(b"\0" + square.tobytes(), np.uint8)[1:]
        misaligned = np.ndarray(square.shape, dtype, octets)
        assert not misaligned.flags.aligned
        layouts = [square.T, square[::-3, ::2], misaligned, square.view(np.matrix)]
        layouts += [square.reshape(2, 64, 128).swapaxes(0, 1), np.ma.masked_array(square)]
        if dtype != BF16:  # ml_dtypes has no other byte order
            layouts.append(square.astype(dtype.newbyteorder(">")))
        for view in layouts:
            copy = np.array(view, dtype, order="C")
            expected = kernels.quantize(copy, quant_type, method=method)
            found = kernels.quantize(view, quant_type, method=method, jobs=3)
            assert_same_parts(found, expected)
        values = raw(kernels.dequantize(expected))
        for part in (np.asfortranarray, lambda part: np.repeat(part, 2, axis=0)[::2]):
            np.testing.assert_array_equal(
                raw(kernels.dequantize(map_parts(expected, part))), values
            )
