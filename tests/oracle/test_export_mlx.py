"""mlx-lm computes from exported folders bit for bit what the stored model computes."""

import json
from pathlib import Path
from typing import Any

import mlx_lm
import numpy as np
import pytest
from mlx import core as mx
from safetensors.numpy import load_file
from support import PYCODE, PYCODE_MOE
from support.checkpoints import write_checkpoint

import blobstore
from blobstore.errors import UnsupportedSourceError
from blobstore.store.local.store import Store

TOKENS = mx.array(np.load(PYCODE / "heldout_ids.npy")[:2].astype(np.int32)[None])


def logits(model: Any) -> np.ndarray[Any, Any]:
    return np.array(model(TOKENS).astype(mx.float32))


@pytest.mark.parametrize(
    ("source", "options"),
    [(PYCODE, {"quant": "int4"}), (PYCODE_MOE, {"quant": "mxfp8", "experts": "stacked"})],
    ids=["dense", "mixture"],
)
def test_logits_and_tokens_are_those_of_the_stored_model(
    source: Path, options: dict[str, Any], store: Store, tmp_path: Path
) -> None:
    blobstore.import_model(source, "m", store=store, **options)
    out = tmp_path / "out"
    blobstore.export_model("m", out, store=store, format="mlx", max_shard_size=2_000_000)
    model, tokenizer = mlx_lm.load(str(out))
    theirs, its = blobstore.mlx_lm.load("m", store=store)
    assert tokenizer.encode("def f(x):") == its.encode("def f(x):")
    np.testing.assert_array_equal(logits(model), logits(theirs))


@pytest.mark.parametrize(
    ("quant", "general"),
    [
        ("int4", {"group_size": 32, "bits": 4, "mode": "affine"}),
        (None, {"group_size": 128, "bits": 8, "mode": "affine"}),  # that of most modules
    ],
)
def test_settings_of_the_asked_type_are_the_general_ones_and_it_comes_back(
    store: Store, tmp_path: Path, quant: str | None, general: dict[str, Any]
) -> None:
    rules = ["*.q_proj.*=mxfp4", "*.mlp.*=int8/128", "*embed*=nvfp4"]
    first = blobstore.import_model(PYCODE, "m", store=store, quant=quant, rules=rules)
    blobstore.export_model("m", tmp_path / "out", store=store, format="mlx")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    modules = {path: value for path, value in settings.items() if isinstance(value, dict)}
    assert settings == general | modules
    assert modules["model.embed_tokens"] == {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    assert any(".mlp." in path for path in modules) == (quant is not None)
    if quant is not None:
        again = blobstore.import_model(tmp_path / "out", "again", store=store)
        assert again.manifest.config == first.manifest.config


def test_what_mlx_lm_can_not_have_is_refused(store: Store, tmp_path: Path) -> None:
    config = json.loads((PYCODE / "config.json").read_text())
    wide: dict[str, Any] = dict(load_file(PYCODE / "model.safetensors"))
    wide["model.norm.weight"] = wide["model.norm.weight"].astype(np.float64)
    source = write_checkpoint(tmp_path / "wide", wide, config)
    cases: list[tuple[Path, str, dict[str, Any]]] = [
        (source, "F64", {}),
        (PYCODE, "global scale", {"quant": "nvfp4", "global_scale": True}),
    ]
    for folder, says, options in cases:
        blobstore.import_model(folder, "m", store=store, **options)
        with pytest.raises(UnsupportedSourceError, match=says):
            blobstore.export_model("m", tmp_path / "out", store=store, format="mlx")
    assert not (tmp_path / "out").exists()
