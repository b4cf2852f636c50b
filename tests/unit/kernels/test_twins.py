"""Every native target, not only the machine's best, stores and reads the bits of the NumPy twin."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from support.weights import (
    BF16,
    DTYPES,
    EVERY,
    F16,
    F32,
    FP,
    TARGETS,
    TWIN,
    assert_same_parts,
    edge_weights,
    every_16_bit_value,
    flat,
    parts_of,
    random_importance,
    random_weights,
    raw,
    raw_or_nan,
    shaped_groups,
)

from blobstore import kernels
from blobstore.formats.dtypes import Quantization, QuantType
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]

DEFAULTS = [("int4", 32), ("int8", 64), *FP]
# Blocks of 16, 8, 4 and 1 groups: whole blocks, one more and one less, and single groups.
FEW = (1, 7, 9, 16, 33)

any_form = pytest.mark.parametrize(("quant_type", "group_size"), EVERY)
any_default = pytest.mark.parametrize(("quant_type", "group_size"), DEFAULTS)


def assert_read_alike(quantized: QuantizedArray[Array], weights: Array | None = None) -> None:
    """Fail unless all targets give the twin's values, and its comparison with weights."""
    for dtype in ("float32", "bfloat16", "float16"):
        expected = raw_or_nan(kernels.dequantize(quantized, dtype, kernel=TWIN))
        for name, kernel in TARGETS.items():
            values = raw_or_nan(kernels.dequantize(quantized, dtype, kernel=kernel))
            np.testing.assert_array_equal(values, expected, err_msg=f"{name} {dtype}")
    if weights is None:
        weights = np.resize(random_weights(BF16, 8, 640).reshape(-1), quantized.size)
    compared = kernels.compare(weights, quantized, kernel=TWIN)
    for name, kernel in TARGETS.items():
        found = kernels.compare(weights, quantized, kernel=kernel)
        np.testing.assert_array_equal(found, compared, err_msg=name)


def assert_quantized_alike(
    weights: Array, quant_type: str, group_size: int, **options: Any
) -> QuantizedArray[Array]:
    """Fail unless all targets store what the twin stores; return that."""
    options["group_size"] = group_size
    expected = kernels.quantize(weights, quant_type, kernel=TWIN, **options)
    for name, kernel in TARGETS.items():
        found = kernels.quantize(weights, quant_type, kernel=kernel, **options)
        assert_same_parts(found, expected, f"{name} {weights.dtype} {weights.shape} {options}")
    return expected


def assert_filled_alike(
    weights: Array, quantization: Quantization, choice: kernels.ScaleChoice
) -> tuple[int, QuantizedArray[Array]]:
    """Fail unless `quantize_into` fills and returns the same with all kernels; return that."""
    kind, row = quantization.quant_type, np.zeros((1, weights.size), weights.dtype)
    results = []
    for kernel in (TWIN, *TARGETS.values()):
        parts = kernels.quantize(row, kind, group_size=quantization.group_size)
        for part in parts_of(parts):
            raw(part).fill(77)
        bad = kernels.quantize_into(weights.reshape(-1), flat(parts), choice, kernel=kernel)
        results.append((bad, parts))
    expected = results[0]
    for bad, parts in results[1:]:
        assert bad == expected[0]
        if bad < 0:
            assert_same_parts(parts, expected[1])
    return expected


@any_form
def test_random_weights_and_edges(quant_type: str, group_size: int) -> None:
    factors: list[dict[str, Any]] = [{}, {"global_scale": True}][: 1 + (quant_type == "nvfp4")]
    alike = partial(assert_quantized_alike, quant_type=quant_type, group_size=group_size)
    for dtype in DTYPES if (quant_type, group_size) in DEFAULTS else [BF16]:
        usual, edges = random_weights(dtype, 9, 384), edge_weights(dtype)
        for factor in factors:
            for weights, importance in ((usual, random_importance(384)), (edges, None)):
                assert_read_alike(alike(weights, **factor), weights)
                alike(weights, method="search", importance=importance, **factor)


@any_default
def test_few_groups(quant_type: str, group_size: int) -> None:
    for groups in FEW:
        dtype = DTYPES[groups % 3]
        weights = shaped_groups(dtype, groups, group_size, seed=(groups,))
        for method in kernels.METHODS:
            assert_quantized_alike(weights, quant_type, group_size, method=method)


@any_default
def test_runs_that_start_in_any_column(quant_type: str, group_size: int) -> None:
    cols = 3 * group_size
    importance = kernels.checked_importance(random_importance(cols), cols)
    kind = Quantization(QuantType(quant_type), group_size)
    columns = ((0, group_size), (1, 2 * group_size + 5), (cols - 1,))
    for dtype, some in zip(DTYPES, columns, strict=True):
        weights = random_weights(dtype, 4, cols)
        for column in some:
            choice = kernels.ScaleChoice("search", importance, column)
            assert assert_filled_alike(weights, kind, choice)[0] == -1


@pytest.mark.parametrize("quant_type", ["int4", "int8"])
def test_16_bit_scales_and_biases_of_any_bits(quant_type: str) -> None:
    kind = QuantType(quant_type)
    for dtype, every in ((BF16, BF16), (F16, F16), (F32, BF16)):
        with np.errstate(invalid="ignore"):  # signalling NaNs
            scales = every_16_bit_value(every)[None, ::31].astype(dtype)
        shape = 1, scales.size * kind.bits
        words = np.random.default_rng(0).integers(0, 2**32, shape, dtype=np.uint32)
        biases = np.ascontiguousarray(scales[:, ::-1])
        assert_read_alike(QuantizedArray(words, scales, biases, None, Quantization(kind, 32)))


@pytest.mark.parametrize(("quant_type", "group_size"), FP)
def test_every_fp_scale_and_code(quant_type: str, group_size: int) -> None:
    octets = np.arange(256, dtype=np.uint8)
    quantization = Quantization(QuantType(quant_type), group_size)
    cols = 256 * 8 // quantization.quant_type.bits
    scales = np.repeat(octets[:, None], cols // group_size, axis=1)
    words = np.repeat(octets.view(np.uint32)[None], 256, axis=0)
    factors = (0.7, -0.0, 1e30, 1e-44) if quant_type == "nvfp4" else ()
    for factor in (None, *(np.array([value], np.float32) for value in factors)):
        assert_read_alike(QuantizedArray(words, scales, None, factor, quantization))


@pytest.mark.parametrize("quant_type", ["int4", "int8"])
def test_the_candidates_of_a_search_are_those_it_is_given(quant_type: str) -> None:
    weights = shaped_groups(BF16, 43, 32)
    usual = kernels.quantize(weights, quant_type, group_size=32, method="search")
    for factors, neighbours in (((), True), ((1.0,), False), ((0.5, 1.0, 1.5), True)):
        given = kernels.AffineCandidates(factors, (-0.5, 0.0, 0.25)[: len(factors)], neighbours)
        choice = kernels.ScaleChoice("search", candidates=given)
        bad, parts = assert_filled_alike(weights, Quantization(QuantType(quant_type), 32), choice)
        assert bad == -1
        assert (raw(parts.scale).ravel() != raw(usual.scale).ravel()).any()


LAST = 40
"""Of 41 groups: a tile of 32, blocks of some lanes, and one group alone."""


@pytest.mark.parametrize("method", kernels.METHODS)
@pytest.mark.parametrize("quant_type", ["int4", "int8"])
def test_quantize_into_says_which_group_has_an_infinite_scale(quant_type: str, method: str) -> None:
    kind, choice = Quantization(QuantType(quant_type), 32), kernels.ScaleChoice(method)
    for dtype in (BF16, F32):
        for groups in ((), (17, 23), (31, 33), (0, LAST)):
            weights = random_weights(dtype, LAST + 1, 32)
            for group in groups:  # spans more than the largest float
                weights[group, [7, 11]] = 3e38, -2e38
            bad, parts = assert_filled_alike(weights, kind, choice)
            assert bad == (groups[0] * 32 if groups else -1)
            assert np.flatnonzero(~np.isfinite(parts.scale)).tolist() == list(groups)
            for place in (0, 20, LAST) if groups else ():
                weights[place, 5] = np.nan  # wherever it is, it comes first
                assert assert_filled_alike(weights, kind, choice)[0] == place * 32 + 5
                weights[place, 5] = 0
