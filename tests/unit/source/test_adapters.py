"""Adapters are not models: an import of one says so, and what to do.

Models with adapters beside them are imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import normal, safetensors_bytes, small_tensors, write_checkpoint

import blobstore
from blobstore.errors import UnsupportedSourceError

Array = np.ndarray[Any, Any]
Q = "layers.0.self_attn.q_proj"
PEFT = {f"base_model.model.model.{Q}.lora_{part}.weight": normal(part, 8, 64) for part in "AB"}
MLX = {f"model.{Q}.lora_{part}": normal(part, 8, 64) for part in "ab"}


def adapter(folder: Path, name: str, tensors: dict[str, Array]) -> Path:
    """Write an adapter as its program does."""
    folder.mkdir()
    (folder / name).write_bytes(safetensors_bytes(tensors))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    return folder


@pytest.mark.parametrize(
    ("name", "tensors"), [("adapter_model.safetensors", PEFT), ("adapters.safetensors", MLX)]
)
@pytest.mark.parametrize("is_file", [True, False])
def test_an_adapter_is_refused_with_what_to_do(
    tmp_path: Path, name: str, tensors: dict[str, Array], is_file: bool
) -> None:
    folder = adapter(tmp_path / "a", name, tensors)
    with pytest.raises(UnsupportedSourceError, match="is an adapter, not a model") as caught:
        blobstore.plan_import(folder / name if is_file else folder)
    assert caught.value.path == str(folder / name)
    assert "Merge it into its model first" in (caught.value.hint or "")


@pytest.mark.parametrize("tensors", [PEFT, MLX])
def test_an_adapter_of_another_name_is_told_by_its_tensors(
    tmp_path: Path, tensors: dict[str, Array]
) -> None:
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(UnsupportedSourceError, match="is an adapter"):
        blobstore.plan_import(tmp_path / "x.safetensors")


def test_a_model_with_an_adapter_beside_it_or_in_it_is_a_model(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "m", {**small_tensors(), f"model.{Q}.lora_A.speech.weight": normal("l", 8, 64)}
    )
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(PEFT))
    plan = blobstore.plan_import(folder)
    assert [one.name for one in plan.inventory.left_out] == ["adapter_model.safetensors"]
