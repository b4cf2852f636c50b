"""The contract of `quantize` and `dequantize`: shapes, dtypes, names, views and threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.blocks import decode_blocks
from support.weights import (
    BF16,
    DTYPES,
    EVERY,
    F16,
    F32,
    TARGETS,
    TWIN,
    assert_same_parts,
    parts_of,
    random_importance,
    random_weights,
    raw,
)

from blobstore import kernels
from blobstore.errors import NonFiniteWeightError
from blobstore.formats.quant import Quantization, QuantType
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]

any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
any_form = pytest.mark.parametrize(("quant_type", "group_size"), EVERY)
any_method = pytest.mark.parametrize("method", kernels.METHODS)
any_kernel = pytest.mark.parametrize(
    "kernel", [*TARGETS.values(), TWIN], ids=lambda kernel: kernel.name
)


@any_method
@any_dtype
@pytest.mark.parametrize("shape", [(6, 256), (2, 3, 256), (1, 2, 3, 256), (0, 256), (3, 0)])
@any_form
def test_parts_have_the_shapes_and_dtypes_of_the_table(
    quant_type: str, group_size: int, shape: tuple[int, ...], dtype: np.dtype[Any], method: str
) -> None:
    weights = random_weights(dtype, *shape)
    quantized = kernels.quantize(weights, quant_type, group_size=group_size, method=method)
    bits = quantized.quant_type.bits
    is_affine = quant_type.startswith("int")
    assert (quantized.weight.shape, quantized.weight.dtype) == (
        (*shape[:-1], shape[-1] * bits // 32),
        np.uint32,
    )
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@any_form
def test_values_are_float32_or_what_is_asked_for_rounded_from_it(
    quant_type: str, group_size: int, dtype: str
) -> None:
    quantized = kernels.quantize(random_weights(F32, 6, 256), quant_type, group_size=group_size)
    values = kernels.dequantize(quantized, dtype)
    assert values.dtype == (BF16 if dtype == "bfloat16" else np.dtype(dtype))
    np.testing.assert_array_equal(
        raw(values), raw(kernels.dequantize(quantized).astype(values.dtype))
    )


@any_method
@any_form
def test_a_tensor_of_rank_4_is_its_rows(quant_type: str, group_size: int, method: str) -> None:
    weights = random_weights(BF16, 2, 3, 4, 128)
    options: dict[str, Any] = {"group_size": group_size, "method": method}
    deep = kernels.quantize(weights, quant_type, **options)
    rows = kernels.quantize(weights.reshape(24, 128), quant_type, **options)
    for part, expected in zip(parts_of(deep), parts_of(rows), strict=True):
        np.testing.assert_array_equal(raw(part).reshape(24, -1), raw(expected))


@any_form
def test_non_contiguous_parts_dequantize_as_their_copies(quant_type: str, group_size: int) -> None:
    whole = kernels.quantize(random_weights(F32, 8, 256), quant_type, group_size=group_size)
    bias = None if whole.bias is None else whole.bias[::2]
    every_second = QuantizedArray(
        whole.weight[::2], whole.scale[::2], bias, None, whole.quantization
    )
    np.testing.assert_array_equal(
        raw(kernels.dequantize(every_second)), raw(kernels.dequantize(whole)[::2].copy())
    )


@any_method
@pytest.mark.parametrize("cuts", [[1], [3, 4], [5, 6, 63]], ids=str)
@any_form
def test_results_do_not_depend_on_how_rows_are_cut(
    quant_type: str, group_size: int, cuts: list[int], method: str
) -> None:
    weights = random_weights(BF16, 64, 384)
    for importance in (None, random_importance(384)) if method == "search" else (None,):
        options: dict[str, Any] = {
            "group_size": group_size,
            "method": method,
            "importance": importance,
        }
        whole = kernels.quantize(weights, quant_type, **options)
        pieces = [kernels.quantize(rows, quant_type, **options) for rows in np.split(weights, cuts)]
        for part, *cut in zip(parts_of(whole), *map(parts_of, pieces), strict=True):
            np.testing.assert_array_equal(raw(part), raw(np.concatenate(cut)))
        values = [kernels.dequantize(piece) for piece in pieces]
        np.testing.assert_array_equal(raw(kernels.dequantize(whole)), raw(np.concatenate(values)))


@any_method
@any_form
def test_results_do_not_depend_on_the_number_of_jobs(
    quant_type: str, group_size: int, method: str
) -> None:
    weights = random_weights(BF16, 37, 384)
    for importance in (None, random_importance(384)) if method == "search" else (None,):
        options: dict[str, Any] = {
            "group_size": group_size,
            "method": method,
            "importance": importance,
        }
        alone = kernels.quantize(weights, quant_type, **options)
        for jobs in (2, 3, 7, 10**4):
            rows = weights[: 1 if jobs > 100 else None]  # more jobs than groups
            expected = alone if len(rows) == 37 else kernels.quantize(rows, quant_type, **options)
            assert_same_parts(
                kernels.quantize(rows, quant_type, jobs=jobs, **options), expected, f"{jobs} jobs"
            )


@any_method
@pytest.mark.parametrize("jobs", [1, 2, 3, 7])
@pytest.mark.parametrize("quant_type", ["int4", "nvfp4"])
def test_the_index_of_the_first_non_finite_weight_does_not_depend_on_the_number_of_jobs(
    quant_type: str, jobs: int, method: str
) -> None:
    weights = random_weights(F32, 40, 128)
    weights[[3, 17, 39], [5, 0, 127]] = np.nan
    for index in ((3, 5), (17, 0), (39, 127)):
        with pytest.raises(NonFiniteWeightError) as caught:
            kernels.quantize(weights, quant_type, method=method, jobs=jobs)
        assert caught.value.index == index
        weights[index] = 0


@any_kernel
@any_dtype
@any_form
def test_inputs_are_only_read(
    quant_type: str, group_size: int, dtype: np.dtype[Any], kernel: kernels.Kernel
) -> None:
    weights = random_weights(dtype, 4, 128)
    before = weights.tobytes()
    weights.flags.writeable = False
    importance = np.ones(128, np.float32)
    importance.flags.writeable = False
    kernels.quantize(
        weights,
        quant_type,
        group_size=group_size,
        method="search",
        importance=importance,
        kernel=kernel,
    )
    quantized = kernels.quantize(weights, quant_type, group_size=group_size, kernel=kernel)
    stored = [part.tobytes() for part in parts_of(quantized)]
    for part in parts_of(quantized):
        part.flags.writeable = False
    kernels.dequantize(quantized, kernel=kernel)
    assert weights.tobytes() == before
    assert [part.tobytes() for part in parts_of(quantized)] == stored


def flat(parts: QuantizedArray[Array]) -> QuantizedArray[Array]:
    """Return flat views of new parts."""
    bias = None if parts.bias is None else parts.bias.reshape(-1)
    return QuantizedArray(
        parts.weight.reshape(-1), parts.scale.reshape(-1), bias, None, parts.quantization
    )


@any_method
@any_kernel
@pytest.mark.parametrize("quant_type", ["int8", "nvfp4"])
def test_quantize_into_overwrites_all_of_the_parts_and_returns_minus_1(
    quant_type: str, kernel: kernels.Kernel, method: str
) -> None:
    weights = random_weights(F16, 4, 128)
    expected = kernels.quantize(weights, quant_type, method=method)
    found = kernels.quantize(np.zeros_like(weights), quant_type)
    for part in parts_of(found):
        part.fill(77)
    choice = kernels.ScaleChoice(method)
    assert kernels.quantize_into(weights.reshape(-1), flat(found), choice, kernel=kernel) == -1
    assert_same_parts(found, expected)


def test_quantize_into_takes_the_kernel_in_use_and_minmax_when_nothing_is_said() -> None:
    weights = random_weights(F16, 4, 128)
    found = kernels.quantize(np.zeros_like(weights), "int8")
    assert kernels.quantize_into(weights.reshape(-1), flat(found)) == -1
    assert_same_parts(found, kernels.quantize(weights, "int8"))


@any_method
@any_kernel
@pytest.mark.parametrize("quant_type", ["int4", "mxfp8"])
def test_quantize_into_returns_the_flat_index_of_the_first_bad_weight(
    quant_type: str, kernel: kernels.Kernel, method: str
) -> None:
    weights = random_weights(F32, 4, 128)
    parts = flat(kernels.quantize(weights, quant_type))
    weights[1, 7] = weights[3, 0] = np.inf
    assert (
        kernels.quantize_into(
            weights.reshape(-1), parts, kernels.ScaleChoice(method), kernel=kernel
        )
        == 135
    )


@pytest.mark.parametrize(
    ("alias", "name"),
    [("q4", "int4"), ("fp4", "int4"), ("q8", "int8"), ("fp8", "int8"), ("NVFP4", "nvfp4")],
)
def test_aliases_mean_the_types_that_ollama_means(alias: str, name: str) -> None:
    weights = random_weights(BF16, 2, 128)
    quantized = kernels.quantize(weights, alias)
    assert quantized.quant_type is QuantType(name)
    assert_same_parts(quantized, kernels.quantize(weights, QuantType(name)))


@pytest.mark.parametrize(
    ("quant_type", "group_size"),
    [("int4", 32), ("int8", 64), ("nvfp4", 16), ("mxfp4", 32), ("mxfp8", 32)],
)
def test_the_group_size_is_the_default_of_the_type_when_none_is_given(
    quant_type: str, group_size: int
) -> None:
    quantized = kernels.quantize(random_weights(BF16, 2, 128), quant_type)
    assert quantized.quantization == Quantization(QuantType(quant_type), group_size)


@any_method
def test_threads_at_work_on_the_same_array_do_not_disturb_each_other(method: str) -> None:
    weights = random_weights(BF16, 256, 1280)
    expected = {
        name: kernels.quantize(weights, name, method=method) for name in ("int4", "nvfp4", "mxfp8")
    }
    names = [*expected] * 8
    with ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(lambda name: kernels.quantize(weights, name, method=method, jobs=2), names)
        )
        values = list(pool.map(kernels.dequantize, results))
    for name, quantized, array in zip(names, results, values, strict=True):
        assert_same_parts(quantized, expected[name])
        np.testing.assert_array_equal(raw(array), raw(kernels.dequantize(expected[name])))


def steps_during(work: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many steps this thread takes while another one works, and that one's result."""
    steps, at_work = 0, threading.Event()

    def start() -> Any:
        at_work.set()
        return work()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(
        60
    )  # longer than the work: a thread gives way only when it releases the lock
    try:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(start)
            at_work.wait()
            while not future.done():
                time.sleep(0.0005)
                steps += 1
    finally:
        sys.setswitchinterval(interval)
    return steps, future.result()


def result_of(work: Callable[[], Any]) -> Any:
    """Return the result of work beside which this thread went on.

    A busy machine may not let it run in that time, so there are many tries.
    """
    for _ in range(50):
        steps, result = steps_during(work)
        if steps > 3:
            return result
    raise AssertionError("the interpreter stands still")


def test_the_interpreter_goes_on_while_a_kernel_works() -> None:
    # A tenth of a second of plain loops: were the lock held, this thread would not take a step
    # before they end.
    weights, plain = random_weights(BF16, 512, 1280), kernels.KERNELS["plain"]
    quantized = result_of(lambda: kernels.quantize(weights, "int4", method="search", kernel=plain))
    assert_same_parts(quantized, kernels.quantize(weights, "int4", method="search"))


def test_the_interpreter_goes_on_while_blocks_are_decoded() -> None:
    codes, scales, plain = (
        np.zeros(2**24, np.uint8),
        np.ones(2**10, np.float32),
        kernels.KERNELS["plain"],
    )
    run = kernels.BlockRun(rows=2**12, cols=2**12, first=0, count=codes.size)
    values = result_of(lambda: decode_blocks(codes, scales, run, kernel=plain))
    assert not values.any()
