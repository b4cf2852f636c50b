"""Quality against a quantized source: copies have no error, requantized tensors have one."""

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import LLAMA_CONFIG, normal, write_checkpoint
from support.producers import COPIED, Kind, nvfp4

import blobstore
from blobstore.store.local.store import Store

UP = "model.layers.0.mlp.up_proj"
NORM = "model.layers.0.norm.weight"
NVFP4 = nvfp4(modelopt=False)
MLX, MODELOPT = COPIED["mlx int4/64 bfloat16"], COPIED["modelopt"]


def source_of(folder: Path, kind: Kind, *weights: Any) -> Path:
    tensors = {NORM: normal("norm", 64)}
    for weight in weights:
        tensors |= weight.tensors
    return write_checkpoint(folder, tensors, {**LLAMA_CONFIG, **kind.config})


@pytest.mark.parametrize("kind", [MLX, MODELOPT, NVFP4], ids=["mlx", "modelopt", "nvfp4"])
def test_a_copy_has_no_error(store: Store, tmp_path: Path, kind: Kind) -> None:
    weight = kind.make(UP, (6, 256))
    source = source_of(tmp_path / "s", kind, weight)
    blobstore.import_model(source, "m", store=store)
    tensors = blobstore.measure_quality("m", source, store=store).tensors
    (found,) = (tensor for tensor in tensors if tensor.name == weight.name)
    assert {tensor.name for tensor in tensors} == {weight.name, NORM}
    assert (found.type_name, found.shape) == (weight.quant_type, (6, 256))
    errors = found.errors
    assert (errors.count, errors.max_error, errors.rmse, errors.cosine) == (6 * 256, 0, 0, 1)


def test_a_float_model_against_a_quantized_source_and_the_other_way_round(
    store: Store, tmp_path: Path
) -> None:
    weight = MLX.make(UP, (6, 256))
    quantized = source_of(tmp_path / "q", MLX, weight)
    plain = write_checkpoint(tmp_path / "p", {NORM: normal("norm", 64), weight.name: weight.values})
    for stored, source in ((quantized, plain), (plain, quantized)):
        blobstore.import_model(stored, "m", store=store)
        report = blobstore.measure_quality("m", source, store=store)
        assert (report.errors.rmse, report.errors.count) == (0, 6 * 256)
