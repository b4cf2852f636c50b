"""Mistakes in an import's arguments: typed errors, and an unchanged store."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import normal, safetensors_bytes, write_checkpoint

import blobstore
from blobstore.errors import UnsupportedSourceError, UsageError
from blobstore.store.local.store import Store

UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
SEARCH: dict[str, Any] = {"quant": "int4", "method": "search"}
ONES = np.ones(64, np.float32)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"qaunt": "int4"}, "'qaunt'"),
        ({"rules": "*=int4"}, "rules"),
        ({"alignment": 2**26}, "power of two"),
        ({"requantize": True}, "quantization type"),
        ({"pure": True}, "quantization type"),
        ({"pure": True, "quant": "int4", "target_bpw": 5.0}, "target"),
        ({"importance": {UP: ONES}, "quant": "int4"}, "method search"),
        ({"global_scale": True, "quant": "mxfp4"}, "nvfp4"),
    ],
)
def test_options_that_are_wrong_use(source: Path, options: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        blobstore.plan_import(source, **options)


@pytest.mark.parametrize(
    ("vectors", "names"),
    [
        ({"nobody.weight": ONES}, "'nobody.weight'"),
        ({NORM: ONES}, NORM),
        ({UP: np.ones(65, np.float32)}, "65 values for 64 columns"),
        ({UP: np.where(np.arange(64) == 5, -1, ONES)}, "column 5"),
        ({UP: np.where(np.arange(64) == 5, np.nan, ONES)}, "column 5"),
        ({UP: np.ones((1, 64), np.float32)}, "[1, 64]"),
    ],
)
def test_wrong_importance(
    source: Path, tmp_path: Path, vectors: dict[str, Any], names: str
) -> None:
    file = tmp_path / "importance.safetensors"
    file.write_bytes(safetensors_bytes({name: v.astype("f4") for name, v in vectors.items()}))
    for importance in (vectors, file):
        with pytest.raises(UsageError, match="importance") as caught:
            blobstore.plan_import(source, importance=importance, **SEARCH)
        assert names in caught.value.message


def test_a_name_that_a_global_scale_needs_is_refused(store: Store, tmp_path: Path) -> None:
    tensors = {"x.weight": normal("x", 32, 64), "x.weight.global_scale": normal("g", 1)}
    source = write_checkpoint(tmp_path / "m", tensors)
    with pytest.raises(UnsupportedSourceError, match=r"x\.weight\.global_scale"):
        blobstore.import_model(source, "m", store=store, quant="nvfp4", global_scale=True)
    assert not list(store.root.rglob("sha256-*"))
