"""The cases of docs/formats.md section 8 that no record shows, in both profiles.

The others are in test_ollama_records.py (an MLX config without `mode`, modules of their own
width, the model's type) and test_ollama_refusals.py (cut off data, gaps in the expert numbers,
tensors that the index does not name).
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.arrays import plain
from support.checkpoints import LLAMA_CONFIG, normal, write_checkpoint
from support.producers import FP8_CONFIG, block_fp8

import blobstore
from blobstore.errors import UnsupportedSourceError
from blobstore.inspection.listing import summarize
from blobstore.names import ModelName
from blobstore.store.local.store import Store

UP = "model.layers.0.mlp.up_proj"
every_profile = pytest.mark.parametrize("profile", ["ollama", "default"])


@every_profile
def test_f64_weights_do_not_vanish_on_load(store: Store, tmp_path: Path, profile: str) -> None:
    name = f"{UP}.weight"
    array = np.random.default_rng(64).standard_normal((4, 64))
    blobstore.import_model(
        write_checkpoint(tmp_path / "s", {name: array}), "m", store=store, profile=profile
    )
    with blobstore.open_model("m", store=store, verify=True) as model:
        stored = plain(model[name])
        assert stored.dtype == np.float64
        assert stored.tobytes() == array.tobytes()
        np.testing.assert_array_equal(model[name].dequantize(), array.astype(np.float32))


@every_profile
def test_an_fp8_weight_without_scale_is_not_copied_as_if_it_were_data(
    tmp_path: Path, profile: str
) -> None:
    weights = [block_fp8().make(f"{UP}{number}", (4, 32)) for number in range(2)]
    tensors = weights[0].tensors | {weights[1].name: weights[1].tensors[weights[1].name]}
    source = write_checkpoint(tmp_path / "s", tensors, {**LLAMA_CONFIG, **FP8_CONFIG})
    with pytest.raises(
        UnsupportedSourceError, match=f"'{UP}1.weight' is F8_E4M3: an FP8 weight without a scale"
    ):
        blobstore.plan_import(source, profile=profile)


@every_profile
@pytest.mark.parametrize(
    ("name", "config"),
    [(f"{UP}.weight", {}), ("model.layers.0.mlp.experts.gate_up_proj", FP8_CONFIG)],
)
def test_fp8_weights_without_any_scale_are_not_data_either(
    tmp_path: Path, name: str, config: dict[str, object], profile: str
) -> None:
    tensors = {name: np.ones((2, 4, 32), ml_dtypes.float8_e4m3fn)}
    source = write_checkpoint(tmp_path / "s", tensors, {**LLAMA_CONFIG, **config})
    with pytest.raises(UnsupportedSourceError, match="an FP8 weight without a scale") as caught:
        blobstore.plan_import(source, profile=profile)
    assert caught.value.tensor == name


@every_profile
def test_an_fp8_tensor_that_is_no_weight_is_copied(
    store: Store, tmp_path: Path, profile: str
) -> None:
    tensors = {"table": np.ones((4, 32), ml_dtypes.float8_e4m3fn)}
    blobstore.import_model(
        write_checkpoint(tmp_path / "s", tensors), "m", store=store, profile=profile
    )
    with blobstore.open_model("m", store=store) as model:
        assert model["table"].raw() == tensors["table"].tobytes()


@every_profile
def test_blobs_that_hold_only_a_bias_are_shown(store: Store, tmp_path: Path, profile: str) -> None:
    tensors = {f"{UP}.bias": normal("b", 64), "model.layers.0.router.scale": normal("s", 32)}
    blobstore.import_model(
        write_checkpoint(tmp_path / "s", tensors), "m", store=store, profile=profile
    )
    name = ModelName(model="m")
    summary, stored = summarize(store, name, store.manifest(name))
    assert [(tensor.name, tensor.shape) for tensor in stored] == [
        ("model.layers.0.mlp.up_proj.bias", (64,)),
        ("model.layers.0.router.scale", (32,)),
    ]
    assert summary.parameters == 96
