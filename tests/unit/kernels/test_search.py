"""A search is, without tolerance, never worse than minmax in any group, and better on average."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.weights import (
    BF16,
    DTYPES,
    FP,
    edge_weights,
    random_importance,
    shaped_groups,
    squared_errors,
)

from blobstore import kernels
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]

DEFAULTS = [("int4", 32), ("int8", 64), *FP]

any_default = pytest.mark.parametrize(("quant_type", "group_size"), DEFAULTS)


def both(
    weights: Array, quant_type: str, group_size: int, importance: Array | None = None
) -> tuple[QuantizedArray[Array], QuantizedArray[Array]]:
    options: dict[str, Any] = {"method": "search", "importance": importance}
    return (
        kernels.quantize(weights, quant_type, group_size=group_size, **options),
        kernels.quantize(weights, quant_type, group_size=group_size),
    )


def assert_never_worse(
    weights: Array, quant_type: str, group_size: int, importance: Array | None = None
) -> None:
    """Fail if a group's error exceeds minmax's, unless that overflows; or if a scale is NaN."""
    searched, minmax = both(weights, quant_type, group_size, importance)
    with np.errstate(over="ignore", invalid="ignore"):
        found = squared_errors(weights, searched, importance)
        bound = squared_errors(weights, minmax, importance)
    worse = np.isfinite(bound) & ~(found <= bound)
    assert not worse.any(), f"groups {np.flatnonzero(worse)[:5]}: {found[worse][:5]}"
    if searched.bias is not None:
        assert not np.isnan(searched.scale).any()
        assert not np.isnan(searched.bias).any()
    else:
        nan = {0x7F, 0xFF} if quant_type == "nvfp4" else {0xFF}
        assert not nan & set(np.unique(searched.scale).tolist())


@any_default
def test_any_magnitude_and_the_edges_of_the_format(quant_type: str, group_size: int) -> None:
    noise = np.random.default_rng(group_size).standard_normal((2, 128))
    powers = 2.0 ** np.arange(-150, 129)[:, None, None]
    for dtype in DTYPES:
        limit = float(ml_dtypes.finfo(dtype).max)
        with np.errstate(over="ignore"):
            scaled = np.clip((noise * powers).reshape(-1, 128), -limit, limit).astype(dtype)
        usual = shaped_groups(dtype, 640, group_size).reshape(-1, 128)
        for weights in (usual, scaled, edge_weights(dtype)):
            for importance in (None, random_importance(128)):
                assert_never_worse(weights, quant_type, group_size, importance)


@any_default
def test_a_huge_weight_of_importance_0_ends_no_search(quant_type: str, group_size: int) -> None:
    weights = np.random.default_rng(4).standard_normal((64, group_size)).astype(np.float32)
    weights[:, 3] = 1e22  # its squared error is infinite
    importance = np.where(np.arange(group_size) == 3, 0.0, 1.0)
    quantized, _ = both(weights, quant_type, group_size, importance)
    error = (kernels.dequantize(quantized).astype(np.float64) - weights) * importance
    assert np.sqrt(np.mean(error**2)) < 0.2


def test_the_error_on_normal_weights_is_at_most_this_part_of_minmax_s() -> None:
    weights = (np.random.default_rng(7).standard_normal((128, 1280)) * 0.7).astype(BF16)
    importance = random_importance(1280)
    bounds = [("int4", 32, 0.87), ("int8", 64, 0.89), ("nvfp4", 16, 0.87), ("mxfp4", 32, 0.96)]
    for quant_type, group_size, bound in bounds:
        searched, minmax = both(weights, quant_type, group_size)
        sums = [squared_errors(weights, parts).sum() for parts in (searched, minmax)]
        assert np.sqrt(sums[0] / sums[1]) <= bound
        weighted, _ = both(weights, quant_type, group_size, importance)
        sums = [squared_errors(weights, parts, importance).sum() for parts in (weighted, searched)]
        assert sums[0] < sums[1]
