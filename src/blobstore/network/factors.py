"""Factors: weights that ``sanitize`` multiplies, row by row, so that affine codes can keep their place under other scales.

Falcon-H1 folds multipliers into most of its weights (mlx_lm 0.32.2 models/falcon_h1.py `sanitize`). ``sanitize`` is run on
probes instead of weights; where it is a product with one number a row, that number is read off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from blobstore.network.expressions import Array

_PROBES = ((1, 0.0), (7, 1.0))
"""Period and step of each probe's values: all ones, and 1 to 7 again and again."""
_SAME = 1e-5
"""Of float32 products, relative."""


def row_factors(
    make_network: Callable[[], Any], stand_ins: Mapping[str, Any], weights: Mapping[str, str]
) -> dict[str, Array]:
    """Return, by parameter, the float32 factor of each row, for those parameters that are products of one weight.

    ``weights``: by parameter, the name of the only tensor that it is computed from. ``stand_ins``: all tensors. Other
    parameters are left out: their values are not such a product, or their shape is not that of the tensor.
    """
    import mlx.core as mx

    if not weights:
        return {}
    probes = [_probed(make_network, stand_ins, weights.values(), *probe, mx) for probe in _PROBES]
    found: dict[str, Array] = {}
    for parameter, tensor in weights.items():
        shape = stand_ins[tensor].shape
        ones, ramp = (np.array(made[parameter].astype(mx.float32)) for made in probes)
        factors = ones.reshape(-1, ones.shape[-1])[:, :1]
        wanted = _probe(shape, *_PROBES[1]) * ones if ones.shape == shape else None
        if wanted is not None and _is_same(ramp, wanted) and _is_same(ones.reshape(-1, shape[-1]), factors):
            found[parameter] = factors[:, 0].reshape(shape[:-1])
    return found


def _probed(
    make_network: Callable[[], Any],
    stand_ins: Mapping[str, Any],
    tensors: Iterable[str],
    period: int,
    step: float,
    mx: Any,
) -> Mapping[str, Any]:
    lazily = {name: _lazy_probe(stand_ins[name].shape, period, step, mx) for name in tensors}
    made: Mapping[str, Any] = make_network().sanitize({**stand_ins, **lazily})
    return made


def _lazy_probe(shape: tuple[int, ...], period: int, step: float, mx: Any) -> Any:
    """Return the probe as an array that MLX makes when a product of it is evaluated."""
    row = mx.arange(shape[-1]) % period
    return mx.broadcast_to(1.0 + step * row.astype(mx.float32), shape)


def _probe(shape: tuple[int, ...], period: int, step: float) -> Array:
    return np.broadcast_to(1.0 + step * (np.arange(shape[-1]) % period).astype(np.float32), shape)


def _is_same(one: Array, other: Array) -> bool:
    return bool(np.allclose(one, other, rtol=_SAME, atol=0))
