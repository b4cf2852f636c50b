"""mlx-lm computes from exported folders bit for bit what the stored model computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx_lm
import numpy as np
import pytest
from mlx import core as mx
from mlx_lm import utils
from safetensors.numpy import load_file
from support import PYCODE, PYCODE_MOE, QUANT_TYPES
from support.checkpoints import write_checkpoint

import blobstore
from blobstore.errors import UnsupportedSourceError
from blobstore.mlx_lm.loading import _make_runnable
from blobstore.store.local.store import Store

TOKENS = mx.array(np.load(PYCODE / "heldout_ids.npy")[:4].astype(np.int32)[None])


def logits(model: Any) -> np.ndarray[Any, Any]:
    _make_runnable(
        model
    )  # unquantized experts, on a CPU: mlx-lm alone would fail when it multiplies them
    return np.array(model(TOKENS).astype(mx.float32))


@pytest.mark.parametrize("quant", [None, *QUANT_TYPES])
@pytest.mark.parametrize("source", [PYCODE, PYCODE_MOE], ids=["dense", "mixture"])
def test_logits_are_those_of_the_stored_model(
    source: Path, quant: str | None, store: Store, tmp_path: Path
) -> None:
    blobstore.import_model(source, "m", store=store, quant=quant)
    blobstore.export_model(
        "m", tmp_path / "out", store=store, format="mlx", max_shard_size=2_000_000
    )
    loaded, config = utils.load_model(tmp_path / "out", lazy=True)
    assert ("quantization" in config) == (quant is not None)
    np.testing.assert_array_equal(
        logits(loaded), logits(blobstore.mlx_lm.load("m", store=store)[0])
    )


def test_mlx_lm_opens_the_folder_with_its_tokenizer(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(PYCODE_MOE, "m", store=store, quant="mxfp8", experts="stacked")
    blobstore.export_model("m", tmp_path / "out", store=store, format="mlx")
    model, tokenizer = mlx_lm.load(str(tmp_path / "out"))
    theirs, its = blobstore.mlx_lm.load("m", store=store)
    assert tokenizer.encode("def f(x):") == its.encode("def f(x):")
    np.testing.assert_array_equal(logits(model), logits(theirs))


@pytest.mark.parametrize("source", [PYCODE, PYCODE_MOE], ids=["dense", "mixture"])
def test_dequantized_folders_of_both_formats_compute_the_same(
    source: Path, store: Store, tmp_path: Path
) -> None:
    blobstore.import_model(source, "m", store=store, quant="int8")
    for form in ("mlx", "safetensors"):
        blobstore.export_model("m", tmp_path / form, store=store, format=form, dequantize="float32")
    mlx, config = utils.load_model(tmp_path / "mlx", lazy=True)
    assert (config["torch_dtype"], "quantization" in config) == ("float32", False)
    np.testing.assert_array_equal(
        logits(mlx), logits(utils.load_model(tmp_path / "safetensors", lazy=True)[0])
    )


RULES = ["*.q_proj.*=mxfp4", "*.mlp.*=int8/128", "*embed*=nvfp4"]


def exported_settings(store: Store, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Export the model ``m`` for mlx-lm and return its general settings, and those of modules."""
    blobstore.export_model("m", folder, store=store, format="mlx")
    settings = json.loads((folder / "config.json").read_text())["quantization"]
    modules = {path: value for path, value in settings.items() if isinstance(value, dict)}
    return {key: value for key, value in settings.items() if key not in modules}, modules


def test_settings_of_most_modules_are_the_general_ones(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(PYCODE, "m", store=store, rules=RULES)
    general, modules = exported_settings(store, tmp_path / "out")
    assert general == {
        "group_size": 128,
        "bits": 8,
        "mode": "affine",
    }  # three projections a layer, the most frequent
    assert modules["model.embed_tokens"] == {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    assert modules["model.layers.0.self_attn.q_proj"] == {
        "group_size": 32,
        "bits": 4,
        "mode": "mxfp4",
    }
    assert not any(".mlp." in path for path in modules)


@pytest.mark.parametrize(
    ("quant", "general"), [("int4", (32, 4, "affine")), ("nvfp4", (16, 4, "nvfp4"))]
)
def test_settings_of_the_asked_type_are_the_general_ones_and_it_comes_back(
    store: Store, tmp_path: Path, quant: str, general: tuple[int, int, str]
) -> None:
    first = blobstore.import_model(PYCODE, "m", store=store, quant=quant, rules=RULES)
    settings, modules = exported_settings(store, tmp_path / "out")
    assert tuple(settings.values()) == general
    assert modules["model.layers.0.mlp.up_proj"] == {"group_size": 128, "bits": 8, "mode": "affine"}
    again = blobstore.import_model(tmp_path / "out", "again", store=store)
    assert again.manifest.config == first.manifest.config


def test_global_scales_are_refused_by_name(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(PYCODE, "m", store=store, quant="nvfp4", global_scale=True)
    with pytest.raises(
        UnsupportedSourceError, match=r"_proj\.weight' has a global scale"
    ) as caught:
        blobstore.export_model("m", tmp_path / "out", store=store, format="mlx")
    assert "dequantize=" in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_what_mlx_lm_can_not_have_is_refused(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(
        write_checkpoint(tmp_path / "in", config={"model_type": "nope"}), "unknown", store=store
    )
    config = json.loads((PYCODE / "config.json").read_text())
    blobstore.import_model(write_checkpoint(tmp_path / "in", config=config), "missing", store=store)
    wide: dict[str, Any] = dict(load_file(PYCODE / "model.safetensors"))
    wide["model.norm.weight"] = wide["model.norm.weight"].astype(np.float64)
    blobstore.import_model(write_checkpoint(tmp_path / "in", wide, config), "wide", store=store)
    for name, says in {
        "unknown": "nope",
        "missing": "missing:latest",
        "wide": "MLX has no F64 arrays",
    }.items():
        with pytest.raises(UnsupportedSourceError, match=says):
            blobstore.export_model(name, tmp_path / "out", store=store, format="mlx")
        assert not (tmp_path / "out").exists()
