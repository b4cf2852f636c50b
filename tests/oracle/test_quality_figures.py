"""Figures of a quality report equal those computed in float64 from whole tensors."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import PYCODE_MOE
from support.checkpoints import normal, write_checkpoint

import blobstore
from blobstore import QuantizedArray
from blobstore.inspection.comparison import CHUNK_WEIGHTS, Errors
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def figures(exact: Array, got: Array) -> dict[str, Any]:
    """Return the expected errors of the weights ``exact`` that are read back as ``got``."""
    rmse, rms = (np.sqrt(np.mean(one**2)) if one.size else 0.0 for one in (exact - got, exact))
    lengths = np.linalg.norm(exact) * np.linalg.norm(got)
    return {
        "count": exact.size,
        "rmse": rmse,
        "relative_rmse": 0.0 if not rmse else rmse / rms if rms else None,
        "max_error": np.abs(exact - got).max(initial=0),
        "cosine": 1.0 if not rmse else exact @ got / lengths if lengths else 0.0,
    }


def saturated(weights: Array, stored: QuantizedArray[Array]) -> float:
    """Return the share of weights half a step or more beyond the last code of their group."""
    rows = weights.astype(np.float64).reshape(-1, stored.group_size)
    if stored.bias is not None:
        scale, bias = (one.astype(np.float64).reshape(-1, 1) for one in (stored.scale, stored.bias))
        last = 2**stored.quant_type.bits - 0.5
        ends = np.sort(np.hstack([bias - scale / 2, bias + scale * last]), axis=1)
        beyond = ((rows <= ends[:, :1]) | (rows >= ends[:, 1:])) & (scale != 0)
        return float(beyond.mean())
    factor = 1.0 if stored.global_scale is None else float(stored.global_scale[0])
    kind, end = {"nvfp4": (E4M3, 7.0), "mxfp8": (E8M0, 464.0)}[stored.quant_type.value]
    end = end * factor * stored.scale.view(kind).astype(np.float64).reshape(-1, 1)
    return float(((np.abs(rows) >= end) & (end > 0)).mean())


def assert_errors(errors: Errors, exact: Array, got: Array, what: str) -> None:
    for key, value in figures(exact, got).items():
        wanted = None if value is None else pytest.approx(value, rel=1e-9, abs=1e-14)
        assert getattr(errors, key) == wanted, f"{what}: {key}"


def check_report(store: Store, source: Path) -> int:
    """Compare the whole report of the model ``m``. Return how many tensors are measured."""
    report = blobstore.measure_quality("m", source, store=store)
    tensors, every = load_file(source / "model.safetensors"), []
    with blobstore.open_model("m", store=store) as model:
        assert {tensor.name for tensor in report.tensors} == set(model)
        for tensor in report.tensors:
            stored, name = model[tensor.name].numpy(), tensor.name
            experts = [name.replace(".experts.", f".experts.{number}.") for number in range(8)]
            stack = [tensors[one] for one in experts if one in tensors]
            weights = tensors[name] if name in tensors else np.stack(stack)
            if not isinstance(stored, QuantizedArray) and stored.dtype == weights.dtype:
                assert tensor.errors == Errors()
                continue
            both = (weights, model[name].dequantize())
            exact, got = (values.astype(np.float64).ravel() for values in both)
            assert_errors(tensor.errors, exact, got, name)
            share = saturated(weights, stored) if isinstance(stored, QuantizedArray) else 0
            # A weight within a rounding of the end of its group may count or not.
            assert tensor.errors.saturated == pytest.approx(share, abs=2.5 / exact.size)
            every.append((exact, got))
    exact, got = (np.concatenate(part) for part in zip(*every, strict=True))
    assert_errors(report.errors, exact, got, "all")
    return len(every)


@pytest.mark.parametrize(
    "options",
    [
        {"quant": "int4", "experts": "packed"},
        {"quant": "nvfp4", "global_scale": True, "experts": "stacked"},
    ],
    ids=["packed experts", "stacked experts"],
)
def test_the_figures_of_a_model(store: Store, options: dict[str, Any]) -> None:
    blobstore.import_model(PYCODE_MOE, "m", store=store, **options)
    assert check_report(store, PYCODE_MOE) > 20


def test_chunks_leave_no_seam(store: Store, tmp_path: Path) -> None:
    weights = normal("big", CHUNK_WEIGHTS // 128 + 77, 192, dtype=np.float32, scale=1.0)
    assert weights.size > CHUNK_WEIGHTS
    assert CHUNK_WEIGHTS % 192 != 0, "a chunk ends inside a row"
    tensors = {"a.weight": weights, "flat": weights.reshape(-1)[: CHUNK_WEIGHTS + 1]}
    source = write_checkpoint(tmp_path / "m", tensors)
    blobstore.import_model(source, "m", store=store, quant="int4", dtype="bfloat16")
    assert check_report(store, source) == 2
