"""Folders for mlx-lm: what it loads from them computes bit for bit what the stored model computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx_lm
import numpy as np
import pytest
from mlx import core as mx
from mlx_lm import utils
from support import PYCODE, PYCODE_MOE, QUANT_TYPES
from support.checkpoints import normal, safetensors_bytes, write_checkpoint

import blobstore
from blobstore.errors import UnsupportedSourceError
from blobstore.mlx_lm import _make_runnable
from blobstore.store import Store

TOKENS = mx.array(np.load(PYCODE / "heldout_ids.npy")[:4].astype(np.int32)[None])


def logits(model: Any) -> np.ndarray[Any, Any]:
    _make_runnable(model)  # unquantized experts, on a CPU: mlx-lm alone would fail when it multiplies them
    return np.array(model(TOKENS).astype(mx.float32))


@pytest.mark.parametrize("quant", [None, *QUANT_TYPES])
@pytest.mark.parametrize("source", [PYCODE, PYCODE_MOE], ids=["dense", "mixture"])
def test_logits_are_those_of_the_stored_model(source: Path, quant: str | None, store: Store, tmp_path: Path) -> None:
    blobstore.import_model(source, "m", store=store, quant=quant)
    blobstore.export_model("m", tmp_path / "out", store=store, format="mlx", max_shard_size=2_000_000)
    loaded, config = utils.load_model(tmp_path / "out", lazy=True)
    assert ("quantization" in config) == (quant is not None)
    np.testing.assert_array_equal(logits(loaded), logits(blobstore.mlx_lm.load("m", store=store)[0]))
