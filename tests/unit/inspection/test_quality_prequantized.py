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
LAYER = "model.layers.0"
EXPERTS = f"{LAYER}.mlp.experts"
NORM = {f"{LAYER}.norm.weight": normal("norm", 64)}
KINDS = {name: kind for name, kind in COPIED.items() if "/64" in name or "int" not in name}


def source_of(folder: Path, kind: Kind, *tensors: dict[str, Array]) -> Path:
    """Write a checkpoint of those tensors and a norm."""
    together = dict(NORM)
    for some in tensors:
        together |= some
    return write_checkpoint(folder, together, {**LLAMA_CONFIG, **kind.config})


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_is_copied_has_no_error(store: Store, tmp_path: Path, kind: Kind) -> None:
    weight = kind.make(f"{LAYER}.mlp.up_proj", (6, 256))
    source = source_of(tmp_path / "s", kind, weight.tensors)
    blobstore.import_model(source, "m", store=store)
    report = {
        tensor.name: tensor
        for tensor in blobstore.measure_quality("m", source, store=store).tensors
    }
    assert set(report) == {weight.name, *NORM}
    assert (report[weight.name].type_name, report[weight.name].shape) == (
        weight.quant_type,
        (6, 256),
    )
    errors = report[weight.name].errors
    assert (errors.count, errors.rmse, errors.max_error, errors.relative_rmse, errors.cosine) == (
        6 * 256,
        0,
        0,
        0,
        1,
    )
    assert report[next(iter(NORM))].kept


@pytest.mark.parametrize("quant", ["int4", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("kind", [*KINDS.values(), block_fp8()], ids=[*KINDS, "fp8"])
def test_what_is_quantized_again(store: Store, tmp_path: Path, kind: Kind, quant: str) -> None:
    weight = kind.make(f"{LAYER}.mlp.up_proj", (6, 256))
    source = source_of(tmp_path / "s", kind, weight.tensors)
    blobstore.import_model(source, "m", store=store, quant=quant, requantize=True)
    with blobstore.open_model("m", store=store) as model:
        stored = model[weight.name].numpy()
        assert isinstance(stored, QuantizedArray)
        wanted = figures(weight.values, model[weight.name].dequantize(), stored)
    if quant == "nvfp4" and not stored.scale.all():
        del wanted[
            "saturated"
        ]  # groups too small for E4M3 have a scale of 0, and those figures leave them out
    measured = blobstore.measure_quality("m", source, store=store).tensors[0]
    assert (measured.name, measured.type_name, measured.quantized, measured.kept) == (
        weight.name,
        quant,
        True,
        False,
    )
    assert_reports(measured.errors, wanted)


@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize(
    "kind", [COPIED["mlx mxfp4"], nvfp4(modelopt=False), block_fp8()], ids=["mlx", "nvfp4", "fp8"]
)
def test_experts(store: Store, tmp_path: Path, kind: Kind, experts: str) -> None:
    weights = [kind.make(f"{EXPERTS}.{expert}.up_proj", (6, 256)) for expert in range(3)]
    source = source_of(tmp_path / "s", kind, *(weight.tensors for weight in weights))
    blobstore.import_model(source, "m", store=store, experts=experts)
    report = blobstore.measure_quality("m", source, store=store)
    assert sum(tensor.errors.count for tensor in report.tensors) == 3 * 6 * 256
    copied = bool(weights[0].arrays)
    assert (report.errors.rmse == 0) == copied


def test_fp8_that_stays_bf16_is_compared_with_what_it_decodes_to(
    store: Store, tmp_path: Path
) -> None:
    kind = block_fp8()
    weight = kind.make("model.embed_tokens", (130, 200))
    source = source_of(tmp_path / "s", kind, weight.tensors)
    blobstore.import_model(source, "m", store=store)
    report = {
        tensor.name: tensor
        for tensor in blobstore.measure_quality("m", source, store=store).tensors
    }
    assert (report[weight.name].type_name, report[weight.name].errors.rmse) == ("BF16", 0)


def test_another_source_is_seen(store: Store, tmp_path: Path) -> None:
    kind = COPIED["modelopt"]
    weight = kind.make(f"{LAYER}.mlp.up_proj", (6, 256))
    blobstore.import_model(source_of(tmp_path / "s", kind, weight.tensors), "m", store=store)
    other = kind.make(f"{LAYER}.mlp.up_proj", (6, 128))
    with pytest.raises(UnsupportedSourceError, match="can't be made of"):
        blobstore.measure_quality("m", source_of(tmp_path / "o", kind, other.tensors), store=store)
    changed = weight.tensors | {f"{LAYER}.norm.weight": normal("other", 64)}
    with pytest.raises(CorruptDataError, match=r"norm\.weight"):
        blobstore.measure_quality("m", source_of(tmp_path / "c", kind, changed), store=store)


def test_a_float_model_against_a_quantized_source_and_the_other_way_round(
    store: Store, tmp_path: Path
) -> None:
    kind = COPIED["mlx int4/64 bfloat16"]
    weight = kind.make(f"{LAYER}.mlp.up_proj", (6, 256))
    quantized = source_of(tmp_path / "q", kind, weight.tensors)
    plain = write_checkpoint(tmp_path / "p", {**NORM, weight.name: weight.values})
    for stored, source in ((quantized, plain), (plain, quantized)):
        blobstore.import_model(stored, "m", store=store)
        report = blobstore.measure_quality("m", source, store=store)
        assert report.errors.rmse == 0
        assert report.errors.count == 6 * 256
