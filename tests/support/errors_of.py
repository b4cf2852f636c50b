"""The figures of a quality report, computed the plain way in float64 from whole tensors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from blobstore import QuantizedArray
from blobstore.inspection.comparison import Errors

Array = np.ndarray[Any, Any]
_BEYOND = {"nvfp4": 7.0, "mxfp4": 7.0, "mxfp8": 464.0}


def figures(weights: Array, read: Array, stored: Any = None) -> dict[str, Any]:
    """Return the expected report for ``weights`` that are read back as ``read``.

    ``stored`` are the quantized arrays.
    """
    exact, got = weights.astype(np.float64).ravel(), read.astype(np.float64).ravel()
    error = exact - got
    rms = np.sqrt(np.mean(exact**2)) if exact.size else 0.0
    rmse = np.sqrt(np.mean(error**2)) if exact.size else 0.0
    lengths = np.linalg.norm(exact) * np.linalg.norm(got)
    return {
        "count": exact.size,
        "rmse": rmse,
        "relative_rmse": 0.0 if not rmse else rmse / rms if rms else None,
        "max_error": np.abs(error).max(initial=0),
        "cosine": 1.0 if not rmse else exact @ got / lengths if lengths else 0.0,
        "saturated": saturated(weights, stored) if isinstance(stored, QuantizedArray) else 0.0,
    }


def saturated(weights: Array, stored: QuantizedArray[Array]) -> float:
    """Return the share of weights half a step or more beyond the last code of their group."""
    rows = weights.astype(np.float64).reshape(-1, stored.group_size)
    if stored.bias is not None:
        scale, bias = (
            part.astype(np.float64).reshape(-1, 1) for part in (stored.scale, stored.bias)
        )
        ends = np.sort(
            np.hstack([bias - scale / 2, bias + scale * (2**stored.quant_type.bits - 0.5)]), axis=1
        )
        beyond = ((rows <= ends[:, :1]) | (rows >= ends[:, 1:])) & (scale != 0)
        return float(beyond.mean())
    if stored.quant_type.value == "nvfp4":
        scale = stored.scale.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        scale = 2.0 ** (stored.scale.astype(np.float64) - 127)
    if stored.global_scale is not None:
        scale = scale * float(stored.global_scale[0])
    end = _BEYOND[stored.quant_type.value] * scale.reshape(-1, 1)
    return float(((np.abs(rows) >= end) & (end > 0)).mean())


def assert_reports(errors: Errors, wanted: dict[str, Any], what: str = "") -> None:
    """Fail unless the report has these figures, up to the last digits.

    The order of summing decides the last digits.
    """
    for key, value in wanted.items():
        # A weight within a rounding of the end of its group may count or not.
        slack = 2.5 / max(1, wanted["count"]) if key == "saturated" else 1e-14
        got = getattr(errors, key)
        assert got == (None if value is None else pytest.approx(value, rel=1e-9, abs=slack)), (
            f"{what}: {key}"
        )
