"""What callers rely on of `quantize` and `dequantize`: shapes, layouts, rows, jobs and threads."""

import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

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
    flat,
    parts_of,
    random_importance,
    random_weights,
    raw,
)

from blobstore import kernels
from blobstore.errors import UsageError
from blobstore.formats.dtypes import Quantization, QuantType
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


def quantizer(**options: Any) -> Callable[..., QuantizedArray[Array]]:
    return partial(kernels.quantize, **options)


@any_type
def test_results_do_not_depend_on_how_rows_are_cut(quant_type: str) -> None:
    weights = random_weights(BF16, 21, 256)
    searched = {"method": "search", "importance": random_importance(256)}
    choices: list[dict[str, Any]] = [{}, searched]
    for options in choices:
        quantized = quantizer(quant_type=quant_type, **options)
        whole = quantized(weights)
        for jobs in (2, 7, 10**4):
            assert_same_parts(quantized(weights, jobs=jobs), whole, f"{jobs} jobs")
        assert_same_parts(quantized(weights[:1], jobs=10**4), quantized(weights[:1]), "1 row")
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


any_method = pytest.mark.parametrize("method", kernels.METHODS)


def scaled(weights: Array, method: str, **options: Any) -> QuantizedArray[Array]:
    return kernels.quantize(weights, "nvfp4", method=method, global_scale=True, **options)


def factor_of(quantized: QuantizedArray[Array]) -> float:
    assert quantized.global_scale is not None
    assert (quantized.global_scale.shape, quantized.global_scale.dtype) == ((1,), np.float32)
    return float(quantized.global_scale[0])


def test_it_is_the_smallest_power_of_two_with_which_all_scales_fit() -> None:
    expected = {0.0: 1.0, 784.0: 0.5, 1568.0: 1.0, float(np.nextafter(1568.0, 3000)): 2.0}
    expected |= {2.0**-149: 2.0**-126, float(np.finfo(F32).max): 2.0**118, float("inf"): 1.0}
    assert {amax: kernels.global_scale_of(amax) for amax in expected} == expected


@any_method
def test_it_is_that_of_the_whole_tensor_and_shared_by_jobs_and_rows(method: str) -> None:
    for dtype in DTYPES:
        weights = (random_weights(F32, 40, 320) * np.float32(1e-3)).astype(dtype)
        whole = scaled(weights, method)
        factor = factor_of(whole)
        assert factor == kernels.global_scale_of(kernels.largest_magnitude(weights))
        assert_same_parts(scaled(weights, method, jobs=3), whole)
        rows = kernels.quantize(weights[8:24], "nvfp4")
        choice = kernels.ScaleChoice(method, global_scale=factor)
        assert kernels.quantize_into(weights[8:24].reshape(-1), flat(rows), choice) == -1
        np.testing.assert_array_equal(rows.weight, whole.weight[8:24])
        np.testing.assert_array_equal(rows.scale, whole.scale[8:24])
        for zeros in (np.full((1, 16), -0.0, dtype), np.zeros((0, 16), dtype)):
            assert factor_of(scaled(zeros, method)) == 1
        weights[2, 3] = -np.nan
        assert kernels.largest_magnitude(weights) == np.inf


def test_a_stored_global_scale_may_be_a_scalar() -> None:
    """Programs that quantize store either form, and it is kept as it is."""
    quantized = kernels.quantize(np.full((2, 64), 6, np.float32), "nvfp4")
    for two in (2, [2]):
        factor = np.array(two, np.float32)
        assert (kernels.dequantize(replace(quantized, global_scale=factor)) == 12).all()


# The flags of /proc/cpuinfo for what each target is compiled for (x86-64 psABI: the levels of the
# processor).
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "fma"},
}


def test_the_targets_are_those_of_this_processor_the_best_first() -> None:
    best = next(iter(TARGETS.values()))
    assert kernels.KERNELS["native"] is best
    assert kernels.active() is best
    if platform.machine() not in {"x86_64", "AMD64"}:
        assert list(TARGETS) in (["neon", "plain"], ["plain"])
        return
    if sys.platform != "linux":
        pytest.skip("TARGETS NOT SHOWN: only Linux lists the processor's flags")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    assert list(TARGETS) == [*(name for name, needed in LEVELS.items() if needed <= flags), "plain"]


def test_a_kernel_is_chosen_by_its_name() -> None:
    try:
        for name in (*TARGETS, "reference"):
            kernels.use(name)
            assert kernels.active() is kernels.KERNELS[name]
            assert kernels.active().name == name
        with pytest.raises(UsageError, match="'nope'"):
            kernels.use("nope")
        assert kernels.active() is TWIN
    finally:
        kernels.use("native")
