"""Quality against a quantized source: copies have no error, requantized tensors have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import LLAMA_CONFIG, normal, write_checkpoint
from support.errors_of import assert_reports, figures
from support.producers import COPIED, Kind, block_fp8, nvfp4

import blobstore
from blobstore import QuantizedArray
from blobstore.errors import CorruptDataError, UnsupportedSourceError
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
UP = "model.layers.0.mlp.up_proj"
NORM = {"model.layers.0.norm.weight": normal("norm", 64)}
KINDS = {
    **{name: COPIED[name] for name in ("mlx int4/64 bfloat16", "mlx mxfp4", "modelopt")},
    "nvfp4": nvfp4(modelopt=False),
}


def source_of(folder: Path, kind: Kind, *tensors: dict[str, Array]) -> Path:
    """Write a checkpoint of those tensors and a norm."""
    together = dict(NORM)
    for some in tensors:
        together |= some
    return write_checkpoint(folder, together, {**LLAMA_CONFIG, **kind.config})


@pytest.mark.parametrize("name", KINDS)
def test_a_copy_has_no_error(store: Store, tmp_path: Path, name: str) -> None:
    weight = KINDS[name].make(UP, (6, 256))
    source = source_of(tmp_path / "s", KINDS[name], weight.tensors)
    blobstore.import_model(source, "m", store=store)
    report = blobstore.measure_quality("m", source, store=store)
    tensors = {tensor.name: tensor for tensor in report.tensors}
    assert set(tensors) == {weight.name, *NORM}
    found = tensors[weight.name]
    assert (found.type_name, found.shape) == (weight.quant_type, (6, 256))
    assert (found.errors.count, found.errors.max_error) == (6 * 256, 0)
    assert (found.errors.rmse, found.errors.relative_rmse, found.errors.cosine) == (0, 0, 1)
    assert tensors[next(iter(NORM))].kept


@pytest.mark.parametrize(
    ("kind", "quant"),
    [(KINDS["modelopt"], "int4"), (KINDS["mlx mxfp4"], "mxfp8"), (block_fp8(), "int4")],
    ids=["modelopt", "mlx", "fp8"],
)
def test_a_tensor_that_was_quantized_again_is_measured(
    store: Store, tmp_path: Path, kind: Kind, quant: str
) -> None:
    weight = kind.make(UP, (6, 256))
    source = source_of(tmp_path / "s", kind, weight.tensors)
    blobstore.import_model(source, "m", store=store, quant=quant, requantize=True)
    with blobstore.open_model("m", store=store) as model:
        stored = model[weight.name].numpy()
        assert isinstance(stored, QuantizedArray)
        wanted = figures(weight.values, model[weight.name].dequantize(), stored)
    measured = blobstore.measure_quality("m", source, store=store).tensors[0]
    assert (measured.name, measured.type_name) == (weight.name, quant)
    assert (measured.quantized, measured.kept) == (True, False)
    assert_reports(measured.errors, wanted)


@pytest.mark.parametrize(
    ("kind", "experts"),
    [(COPIED["mlx mxfp4"], "packed"), (nvfp4(modelopt=False), "stacked"), (block_fp8(), "packed")],
    ids=["mlx", "nvfp4", "fp8"],
)
def test_experts(store: Store, tmp_path: Path, kind: Kind, experts: str) -> None:
    names = [f"model.layers.0.mlp.experts.{expert}.up_proj" for expert in range(3)]
    weights = [kind.make(name, (6, 256)) for name in names]
    source = source_of(tmp_path / "s", kind, *(weight.tensors for weight in weights))
    blobstore.import_model(source, "m", store=store, experts=experts)
    report = blobstore.measure_quality("m", source, store=store)
    assert sum(tensor.errors.count for tensor in report.tensors) == 3 * 6 * 256
    is_copied = bool(weights[0].arrays)
    assert (report.errors.rmse == 0) == is_copied


def test_another_source_is_noticed(store: Store, tmp_path: Path) -> None:
    kind = COPIED["modelopt"]
    weight = kind.make(UP, (6, 256))
    blobstore.import_model(source_of(tmp_path / "s", kind, weight.tensors), "m", store=store)
    other = kind.make(UP, (6, 128))
    with pytest.raises(UnsupportedSourceError, match="can't be made of"):
        blobstore.measure_quality("m", source_of(tmp_path / "o", kind, other.tensors), store=store)
    changed = weight.tensors | {next(iter(NORM)): normal("other", 64)}
    with pytest.raises(CorruptDataError, match=r"norm\.weight"):
        blobstore.measure_quality("m", source_of(tmp_path / "c", kind, changed), store=store)


def test_a_float_model_against_a_quantized_source_and_the_other_way_round(
    store: Store, tmp_path: Path
) -> None:
    kind = COPIED["mlx int4/64 bfloat16"]
    weight = kind.make(UP, (6, 256))
    quantized = source_of(tmp_path / "q", kind, weight.tensors)
    plain = write_checkpoint(tmp_path / "p", {**NORM, weight.name: weight.values})
    for stored, source in ((quantized, plain), (plain, quantized)):
        blobstore.import_model(stored, "m", store=store)
        report = blobstore.measure_quality("m", source, store=store)
        assert (report.errors.rmse, report.errors.count) == (0, 6 * 256)
