"""Exported shards are byte for byte the files that huggingface_hub writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from support.checkpoints import LLAMA_CONFIG

import blobstore
from blobstore.store.local.store import Store

NAMES = (
    "float32",
    "bfloat16",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "float64",
    "float8_e4m3fn",
)


def state_dict() -> dict[str, torch.Tensor]:
    """Return tensors of many dtypes and sizes, sorted neither by name nor as in a file."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(37 + 19 * number, 16, generator=generator) * 50 for number in range(33)]
    return {
        f"t{(7 * number) % 33}.é": value.to(getattr(torch, NAMES[number % len(NAMES)]))
        for number, value in enumerate(values)
    }


@pytest.mark.parametrize("limit", [3000, 10_000, 5_000_000_000])
def test_shards_and_index(tmp_path: Path, store: Store, limit: int) -> None:
    tensors = state_dict()
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    (tmp_path / "in" / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    blobstore.import_model(tmp_path / "in", "m", store=store)
    # The state dict's own order is lost in a file; what is known of it is the file's.
    order = [
        name
        for name in json.loads(header(tmp_path / "in" / "model.safetensors"))
        if name != "__metadata__"
    ]
    (tmp_path / "theirs").mkdir()
    save_torch_state_dict(
        {name: tensors[name] for name in order}, tmp_path / "theirs", max_shard_size=limit
    )
    blobstore.export_model("m", tmp_path / "ours", store=store, max_shard_size=limit)
    wanted = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == sorted(
        [*wanted, "config.json"]
    )
    assert len(wanted) > 2 or limit > 10_000
    for name in wanted:
        assert (tmp_path / "ours" / name).read_bytes() == (
            tmp_path / "theirs" / name
        ).read_bytes(), name


def header(path: Path) -> bytes:
    raw = path.read_bytes()
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")]
