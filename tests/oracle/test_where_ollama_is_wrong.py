"""The cases of docs/formats.md section 8 that no record shows, in both profiles.

The others are in test_ollama_records.py (an MLX config without `mode`, modules of their own
width, the model's type), test_ollama_refusals.py (gaps in the expert numbers) and
unit/source/test_refused_formats.py (FP8 without a scale).
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.arrays import plain
from support.checkpoints import normal, write_checkpoint

import blobstore
from blobstore.store.local.store import Store

UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("profile", ["ollama", "default"])
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
