"""Every native target gives the bits of the NumPy twin, for every type and float format.

Not only the best one that this machine has: a processor of a lower level runs another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.weights import (
    AFFINE,
    BF16,
    DTYPES,
    EVERY,
    F16,
    FP,
    TARGETS,
    TWIN,
    assert_same_parts,
    edge_weights,
    every_16_bit_value,
    random_importance,
    random_weights,
    raw,
    raw_or_nan,
    shaped_groups,
)

from blobstore import kernels
from blobstore.formats.quant import Quantization, QuantType
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]

OUTPUTS = ("float32", "bfloat16", "float16")
# Blocks of 16, 8, 4 and 1 groups: one more and one less than whole blocks, and what is left for
# single groups.
FEW = (*range(1, 19), *range(23, 26), *range(31, 34), 39, 40)

any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
any_16_bit_dtype = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
any_form = pytest.mark.parametrize(("quant_type", "group_size"), EVERY)
any_method = pytest.mark.parametrize("method", kernels.METHODS)


def assert_targets_dequantize_as_twin(quantized: QuantizedArray[Array], what: str = "") -> None:
    for dtype in OUTPUTS:
        expected = raw_or_nan(kernels.dequantize(quantized, dtype, kernel=TWIN))
        for name, kernel in TARGETS.items():
            values = raw_or_nan(kernels.dequantize(quantized, dtype, kernel=kernel))
            np.testing.assert_array_equal(values, expected, err_msg=f"{name} {dtype} {what}")


def assert_targets_equal_twin(
    weights: Array, quant_type: str, group_size: int, **options: Any
) -> QuantizedArray[Array]:
    """Fail unless all targets store what the twin stores, and return that."""
    expected = kernels.quantize(weights, quant_type, group_size=group_size, kernel=TWIN, **options)
    for name, kernel in TARGETS.items():
        quantized = kernels.quantize(
            weights, quant_type, group_size=group_size, kernel=kernel, **options
        )
        assert_same_parts(
            quantized, expected, f"{name} {quant_type}/{group_size} {weights.dtype} {weights.shape}"
        )
    return expected


@any_dtype
@any_form
def test_targets_equal_twin_on_random_weights(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    quantized = assert_targets_equal_twin(random_weights(dtype, 256, 1280), quant_type, group_size)
    assert_targets_dequantize_as_twin(quantized)


@pytest.mark.parametrize("weighted", [False, True], ids=["all alike", "importance"])
@any_dtype
@any_form
def test_targets_search_as_twin_on_random_weights(
    quant_type: str, group_size: int, dtype: np.dtype[Any], weighted: bool
) -> None:
    options = {"method": "search", "importance": random_importance(640) if weighted else None}
    assert_targets_equal_twin(random_weights(dtype, 66, 640), quant_type, group_size, **options)
    groups = shaped_groups(dtype, 5 * 397, group_size).reshape(-1, 5 * group_size)
    options["importance"] = random_importance(groups.shape[1]) if weighted else None
    assert_targets_equal_twin(groups, quant_type, group_size, **options)


@any_method
@any_dtype
@any_form
def test_targets_equal_twin_on_edge_groups(
    quant_type: str, group_size: int, dtype: np.dtype[Any], method: str
) -> None:
    quantized = assert_targets_equal_twin(
        edge_weights(dtype), quant_type, group_size, method=method
    )
    assert_targets_dequantize_as_twin(quantized)
    if method == "search":
        importance = random_importance(128)
        assert_targets_equal_twin(
            edge_weights(dtype), quant_type, group_size, method=method, importance=importance
        )


@any_method
@any_dtype
@any_form
def test_targets_equal_twin_for_1_to_40_groups(
    quant_type: str, group_size: int, dtype: np.dtype[Any], method: str
) -> None:
    weights = shaped_groups(dtype, FEW[-1], group_size, seed=(FEW[-1],))
    for groups in FEW:
        quantized = assert_targets_equal_twin(
            weights[:groups], quant_type, group_size, method=method
        )
        if dtype == DTYPES[groups % 3]:
            assert_targets_dequantize_as_twin(quantized, f"{groups} groups")


@any_dtype
@any_form
def test_targets_equal_twin_for_jobs_whose_first_column_is_not_0(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    weights = random_weights(dtype, 7, 5 * group_size)
    for importance in (None, random_importance(5 * group_size)):
        options: dict[str, Any] = {
            "method": "search",
            "importance": importance,
            "group_size": group_size,
        }
        expected = kernels.quantize(weights, quant_type, kernel=TWIN, jobs=3, **options)
        for jobs in (3, 11):
            for name, kernel in TARGETS.items():
                quantized = kernels.quantize(
                    weights, quant_type, kernel=kernel, jobs=jobs, **options
                )
                assert_same_parts(
                    quantized,
                    expected,
                    f"{name} {quant_type}/{group_size} {weights.dtype} {jobs} jobs",
                )


@any_dtype
@any_form
def test_targets_equal_twin_for_runs_that_start_in_any_column(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    cols = 3 * group_size
    weights = random_weights(dtype, 8, cols)
    importance = kernels.checked_importance(random_importance(cols), cols)
    for column in (1, group_size - 1, group_size, 2 * group_size + 5, cols - 1):
        choice = kernels.ScaleChoice("search", importance, column)
        expected, *found = (
            kernels.quantize(np.zeros_like(weights), quant_type, group_size=group_size)
            for _ in range(1 + len(TARGETS))
        )
        assert kernels.quantize_into(weights.reshape(-1), flat(expected), choice, kernel=TWIN) == -1
        for parts, (name, kernel) in zip(found, TARGETS.items(), strict=True):
            assert (
                kernels.quantize_into(weights.reshape(-1), flat(parts), choice, kernel=kernel) == -1
            )
            assert_same_parts(parts, expected, f"{name} column {column}")


def flat(parts: QuantizedArray[Array]) -> QuantizedArray[Array]:
    """Return flat views of new parts."""
    bias = None if parts.bias is None else parts.bias.reshape(-1)
    return QuantizedArray(
        parts.weight.reshape(-1), parts.scale.reshape(-1), bias, None, parts.quantization
    )


@any_dtype
@any_method
def test_targets_equal_twin_with_a_global_scale(method: str, dtype: np.dtype[Any]) -> None:
    options = {"method": method, "global_scale": True}
    for weights in (
        random_weights(dtype, 96, 640),
        edge_weights(dtype),
        shaped_groups(dtype, 331, 16),
    ):
        assert_targets_dequantize_as_twin(
            assert_targets_equal_twin(weights, "nvfp4", 16, **options)
        )
    small = (random_weights(dtype, 31, 640).astype(np.float32) * np.float32(1e-4)).astype(dtype)
    assert_targets_equal_twin(small, "nvfp4", 16, **options)
    if method == "search":
        assert_targets_equal_twin(small, "nvfp4", 16, importance=random_importance(640), **options)


@any_16_bit_dtype
@pytest.mark.parametrize(("quant_type", "group_size"), [("int4", 32), ("int8", 64), *FP])
def test_targets_equal_twin_with_every_16_bit_value_as_the_edge_of_a_group(
    quant_type: str, group_size: int, dtype: np.dtype[Any]
) -> None:
    every = every_16_bit_value(dtype)
    with np.errstate(invalid="ignore"):
        edges = every[np.isfinite(every)].astype(np.float32)[:, None]
    weights = (edges * np.linspace(-0.5, 1, group_size, dtype=np.float32)).astype(dtype)
    assert_targets_equal_twin(weights, quant_type, group_size)
    assert_targets_dequantize_as_twin(
        kernels.quantize(weights[::16], quant_type, group_size=group_size)
    )
    assert_targets_equal_twin(weights[::9], quant_type, group_size, method="search")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quant_type", ["int4", "int8"])
def test_targets_dequantize_as_twin_with_every_16_bit_scale_and_bias(
    quant_type: str, dtype: np.dtype[Any]
) -> None:
    every = every_16_bit_value(dtype if dtype in (BF16, F16) else BF16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        scales = every.reshape(256, 256).astype(dtype)
    biases = np.ascontiguousarray(scales[::-1, ::-1])
    kind = QuantType(quant_type)
    words = np.random.default_rng(0).integers(0, 2**32, (256, 256 * kind.bits), dtype=np.uint32)
    assert_targets_dequantize_as_twin(
        QuantizedArray(words, scales, biases, None, Quantization(kind, 32))
    )


@pytest.mark.parametrize("output", ["bfloat16", "float16"])
@pytest.mark.parametrize("target", TARGETS)
def test_values_are_rounded_to_16_bits_half_to_even_whatever_their_bits(
    target: str, output: str
) -> None:
    # Codes of 0: the values are the biases, here float32 halfway between 16-bit neighbours and
    # around it.
    dtype = BF16 if output == "bfloat16" else F16
    every = every_16_bit_value(dtype)
    with np.errstate(invalid="ignore"):
        exact = every.astype(np.float32)
        halfway = exact * np.float32(0.5) + np.roll(exact, -1) * np.float32(0.5)
    around = np.concatenate(
        [exact, halfway, *(np.nextafter(halfway, np.float32(end)) for end in (np.inf, -np.inf))]
    )
    biases = around.reshape(1, -1)
    words = np.zeros((1, biases.size * 4), np.uint32)
    quantized = QuantizedArray(
        words, np.ones_like(biases), biases, None, Quantization(QuantType.INT4, 32)
    )
    values = kernels.dequantize(quantized, output, kernel=kernels.KERNELS[target]).reshape(-1, 32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (around + np.float32(0)).astype(dtype)  # 0 * 1 + -0 is 0
    np.testing.assert_array_equal(
        raw_or_nan(values), np.repeat(raw_or_nan(expected)[:, None], 32, axis=1)
    )


@pytest.mark.parametrize("global_scale", [None, 0.7, -0.0, 1e30, 1e-44])
@pytest.mark.parametrize(("quant_type", "group_size"), FP)
def test_targets_dequantize_as_twin_with_every_fp_scale_and_code(
    quant_type: str, group_size: int, global_scale: float | None
) -> None:
    octets = np.arange(256, dtype=np.uint8)
    quantization = Quantization(QuantType(quant_type), group_size)
    cols = 256 * 8 // quantization.quant_type.bits
    scales = np.repeat(octets[:, None], cols // group_size, axis=1)
    words = np.repeat(octets.view(np.uint32)[None], 256, axis=0)
    double = global_scale is not None and quant_type == "nvfp4"
    factor = np.array([global_scale], np.float32) if double else None
    assert_targets_dequantize_as_twin(QuantizedArray(words, scales, None, factor, quantization))


@pytest.mark.parametrize("candidates", [(), (1.0,), (0.5, 1.0, 1.5)], ids=len)
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize(("quant_type", "group_size"), AFFINE)
def test_targets_try_the_candidates_that_they_are_given_as_the_twin_does(
    quant_type: str, group_size: int, neighbours: bool, candidates: tuple[float, ...]
) -> None:
    weights = shaped_groups(BF16, 43, group_size)
    given = kernels.AffineCandidates(candidates, (-0.5, 0.0, 0.25)[: len(candidates)], neighbours)
    expected, *found = (
        kernels.quantize(weights, quant_type, group_size=group_size)
        for _ in range(1 + len(TARGETS))
    )
    choice = kernels.ScaleChoice("search", candidates=given)
    for parts, kernel in zip([expected, *found], [TWIN, *TARGETS.values()], strict=True):
        parts.weight[:] = 77
        assert kernels.quantize_into(weights.reshape(-1), flat(parts), choice, kernel=kernel) == -1
        assert_same_parts(parts, expected, kernel.name)
    searched = kernels.quantize(weights, quant_type, group_size=group_size, method="search")
    assert (raw(searched.scale) != raw(expected.scale)).any()
