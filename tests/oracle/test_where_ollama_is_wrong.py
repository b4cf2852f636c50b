"""The cases of docs/formats.md section 8 that no record shows, in both profiles.

The others are in test_ollama_records.py (an MLX config without `mode`, modules of their own
width, the model's type) and test_ollama_refusals.py (cut off data, gaps in the expert numbers,
tensors that the index does not name).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.arrays import plain
from support.checkpoints import LLAMA_CONFIG, normal, write_checkpoint
from support.producers import FP8_CONFIG, block_fp8

import blobstore
from blobstore.errors import UnsupportedSourceError
from blobstore.store.local.store import Store

UP = "model.layers.0.mlp.up_proj"
BLOCKS = [block_fp8().make(f"{UP}{number}", (4, 32)) for number in range(2)]
WITHOUT_SCALE = {f"{UP}.weight": np.ones((2, 4, 32), ml_dtypes.float8_e4m3fn)}
every_profile = pytest.mark.parametrize("profile", ["ollama", "default"])


@every_profile
def test_tensors_do_not_vanish(store: Store, tmp_path: Path, profile: str) -> None:
    """F64 on load; blobs that hold only a bias in `show`; FP8 that is not a weight."""
    tensors: dict[str, Any] = {
        f"{UP}.weight": np.random.default_rng(64).standard_normal((4, 64)),
        f"{UP}.bias": normal("b", 64),
        "model.layers.0.router.scale": normal("s", 32),
        "table": np.ones((4, 32), ml_dtypes.float8_e4m3fn),
    }
    source = write_checkpoint(tmp_path / "s", tensors)
    blobstore.import_model(source, "m", store=store, profile=profile)
    with blobstore.open_model("m", store=store, verify=True) as model:
        found = {name: (plain(one).dtype, plain(one).tobytes()) for name, one in model.items()}
    assert found == {name: (array.dtype, array.tobytes()) for name, array in tensors.items()}
    shown = blobstore.inspect("m", store=store).tensors
    assert {tensor.name for tensor in shown} == set(tensors)


@every_profile
@pytest.mark.parametrize(
    ("tensors", "config", "name"),
    [
        (BLOCKS[0].tensors | {BLOCKS[1].name: BLOCKS[1].tensors[BLOCKS[1].name]}, FP8_CONFIG, "1"),
        (WITHOUT_SCALE, {}, ""),
    ],
    ids=["one of two", "all"],
)
def test_fp8_weights_without_scale_are_not_copied_as_if_they_were_data(
    tmp_path: Path, tensors: Any, config: dict[str, Any], name: str, profile: str
) -> None:
    source = write_checkpoint(tmp_path / "s", tensors, {**LLAMA_CONFIG, **config})
    with pytest.raises(UnsupportedSourceError, match="without a scale") as caught:
        blobstore.plan_import(source, profile=profile)
    assert caught.value.tensor == f"{UP}{name}.weight"
