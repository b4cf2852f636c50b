"""Figures of a quality report equal those computed from whole tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import PYCODE_MOE
from support.arrays import plain
from support.checkpoints import BF16, normal, write_checkpoint
from support.errors_of import assert_reports, figures

import blobstore
from blobstore.inspection.comparison import CHUNK_WEIGHTS, Errors
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
QUANTS: dict[str, dict[str, Any]] = {
    "int4": {"quant": "int4"},
    "int8": {"quant": "int8"},
    "nvfp4": {"quant": "nvfp4"},
    "nvfp4-scaled": {"quant": "nvfp4", "global_scale": True},
    "mxfp4": {"quant": "mxfp4"},
    "mxfp8": {"quant": "mxfp8"},
}


def source_weights(tensors: dict[str, Array], name: str) -> Array:
    """Return the weights of a tensor of the model.

    Those of stacked experts from the experts' own.
    """
    if name in tensors:
        return tensors[name]
    group, projection = name.split(".experts.")
    return np.stack([tensors[f"{group}.experts.{number}.{projection}"] for number in range(8)])


def check_report(store: Store, source: Path) -> int:
    """Compare the whole report of the model ``m`` with figures computed here.

    Return how many tensors are measured.
    """
    report = blobstore.measure_quality("m", source, store=store)
    tensors = load_file(source / "model.safetensors")
    total, largest = np.zeros(4), 0.0
    with blobstore.open_model("m", store=store) as model:
        assert {tensor.name for tensor in report.tensors} == set(model)
        for tensor in report.tensors:
            stored = model[tensor.name]
            weights = source_weights(tensors, tensor.name)
            assert (tensor.shape, tensor.quantized) == (stored.shape, stored.quant_type is not None)
            assert tensor.type_name == str(stored.quant_type or stored.dtype)
            if stored.quant_type is None and plain(stored).dtype == weights.dtype:
                assert tensor.errors == Errors()
                continue
            read = stored.dequantize().astype(np.float64)
            assert_reports(tensor.errors, figures(weights, read, stored.numpy()), tensor.name)
            exact = weights.astype(np.float64)
            total += [
                exact.size,
                ((exact - read) ** 2).sum(),
                (exact**2).sum(),
                (exact * read).sum(),
            ]
            largest = max(largest, float(np.abs(exact - read).max(initial=0)))
    errors = report.errors
    assert (errors.count, errors.max_error) == (total[0], largest)
    assert errors.rmse == pytest.approx(math.sqrt(total[1] / max(1, total[0])), rel=1e-9)
    assert errors.relative_rmse == pytest.approx(
        math.sqrt(total[1] / total[2]) if total[2] else 0, rel=1e-9
    )
    return sum(tensor.errors.count > 0 for tensor in report.tensors)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (PYCODE_MOE, {**QUANTS["int4"], "method": "search", "experts": "packed"}),
        (PYCODE_MOE, {**QUANTS["nvfp4-scaled"], "experts": "stacked"}),
    ],
    ids=["packed experts", "stacked experts"],
)
def test_the_figures_of_a_model(store: Store, source: Path, options: dict[str, Any]) -> None:
    blobstore.import_model(source, "m", store=store, **options)
    assert check_report(store, source) > 20


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_figures_of_conversions(store: Store, tmp_path: Path, dtype: str) -> None:
    for kind in (np.dtype(np.float32), np.dtype(np.float16), np.dtype(BF16)):
        matrix, norm = normal("a", 33, 64, dtype=kind), normal("n", 5, dtype=kind)
        tensors = {"a.weight": matrix, "norm": norm, "ids": np.arange(5)}
        source = write_checkpoint(tmp_path / kind.name, tensors)
        blobstore.import_model(source, "m", store=store, dtype=dtype)
        assert check_report(store, source) == (0 if kind.name == dtype else 2)


@pytest.mark.parametrize("quant", ["int4", "nvfp4", "mxfp4"])
def test_a_conversion_before_quantization_is_part_of_the_error(
    store: Store, tmp_path: Path, quant: str
) -> None:
    source = write_checkpoint(tmp_path / "m", {"a.weight": normal("a", 33, 64, dtype=np.float32)})
    blobstore.import_model(source, "m", store=store, dtype="bfloat16", **QUANTS[quant])
    assert check_report(store, source) == 1


@pytest.mark.parametrize("quant", ["int4", None])
def test_chunks_leave_no_seam(store: Store, tmp_path: Path, quant: str | None) -> None:
    weights = normal("big", CHUNK_WEIGHTS // 128 + 77, 192, dtype=np.float32, scale=1.0)
    assert weights.size > CHUNK_WEIGHTS
    assert CHUNK_WEIGHTS % 192 != 0, "a chunk ends inside a row"
    tensors = {"a.weight": weights, "flat": weights.reshape(-1)[: CHUNK_WEIGHTS + 1]}
    source = write_checkpoint(tmp_path / "m", tensors)
    options = {"dtype": "bfloat16"} if quant is None else QUANTS[quant]
    blobstore.import_model(source, "m", store=store, **options)
    assert check_report(store, source) == (2 if quant is None else 1)


@pytest.mark.parametrize("quant", ["int8", "nvfp4-scaled", "mxfp8"])
def test_heavy_tails_and_groups_of_zeros(store: Store, tmp_path: Path, quant: str) -> None:
    weights = normal("t", 64, 128, dtype=np.float32, scale=1.0) ** 5
    weights[3], weights[5, :32], weights[7] = 0, 0, 2.5
    source = write_checkpoint(tmp_path / "m", {"a.weight": weights.astype(BF16)})
    blobstore.import_model(source, "m", store=store, method="search", **QUANTS[quant])
    assert check_report(store, source) == 1
