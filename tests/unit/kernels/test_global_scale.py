"""A global scale of nvfp4 keeps small weights out of E4M3's subnormal scales."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.weights import DTYPES, F32, assert_same_parts, flat, random_weights

from blobstore import kernels
from blobstore.kernels.arrays import QuantizedArray

Array = np.ndarray[Any, Any]

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
