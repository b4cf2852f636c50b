"""For any bits at all every native target equals the NumPy twin."""

from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st
from support.weights import DTYPES, TARGETS, TWIN, parts_of, raw_or_nan

from blobstore import kernels
from blobstore.errors import NonFiniteWeightError
from blobstore.formats.dtypes import QuantType

Array = np.ndarray[Any, Any]


def values_of(values: Array) -> bytes:
    """Return the bytes of float values, one pattern for all NaNs."""
    return raw_or_nan(values).tobytes()


def outcome(
    weights: Array, quant_type: str, group_size: int, method: str, kernel: kernels.Kernel
) -> object:
    """Return the bytes of the parts and the values, or the index of the refused weight."""
    with np.errstate(all="ignore"):
        try:
            quantized = kernels.quantize(
                weights, quant_type, group_size=group_size, method=method, kernel=kernel
            )
        except NonFiniteWeightError as error:
            return error.index
        values = kernels.dequantize(quantized, kernel=kernel)
    return [part.tobytes() for part in parts_of(quantized)], values_of(values)


def beside_others(groups: Array, place: int) -> Array:
    """Return 27 groups, the drawn ones at ``place`` and after: lanes of a block, or single ones."""
    others = np.random.default_rng(27).standard_normal((27, groups.shape[1])).astype(np.float32)
    weights = others.astype(groups.dtype)
    weights[place : place + len(groups)] = groups
    return weights


any_type = st.sampled_from([kind.value for kind in QuantType])


def bits(data: st.DataObject, dtype: Any, count: int) -> Array:
    size = count * np.dtype(dtype).itemsize
    drawn: Array = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), dtype)
    return drawn.reshape(1, -1)


@settings(max_examples=50)
@given(data=st.data())
def test_every_target_equals_twin_for_any_bits(data: st.DataObject) -> None:
    quant_type, dtype = data.draw(any_type), data.draw(st.sampled_from(DTYPES))
    group_size = data.draw(st.sampled_from(QuantType(quant_type).group_sizes))
    weights = beside_others(bits(data, dtype, group_size), data.draw(st.integers(0, 26)))
    for method in kernels.METHODS:
        expected = outcome(weights, quant_type, group_size, method, TWIN)
        for name, kernel in TARGETS.items():
            assert outcome(weights, quant_type, group_size, method, kernel) == expected, name
