"""Exported shards are byte for byte the files that huggingface_hub writes."""

import json
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from support.checkpoints import LLAMA_CONFIG

import blobstore
from blobstore.store.local.store import Store

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def state_dict() -> dict[str, torch.Tensor]:
    """Return tensors of many dtypes and sizes, sorted neither by name nor as in a file."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(37 + 19 * number, 16, generator=generator) * 50 for number in range(33)]
    return {
        f"t{(7 * number) % 33}.é": value.to(DTYPES[number % len(DTYPES)])
        for number, value in enumerate(values)
    }


def test_shards_and_index(tmp_path: Path, store: Store) -> None:
    tensors, source, limit = state_dict(), tmp_path / "in", 10_000
    source.mkdir()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    blobstore.import_model(source, "m", store=store)
    blobstore.export_model("m", tmp_path / "ours", store=store, max_shard_size=limit)
    # The state dict's own order is lost in a file; what is known of it is the file's.
    order = blobstore.read_header(source / "model.safetensors").tensors
    (tmp_path / "theirs").mkdir()
    save_torch_state_dict(
        {name: tensors[name] for name in order}, tmp_path / "theirs", max_shard_size=limit
    )
    ours, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        for folder in ("ours", "theirs")
    )
    del ours["config.json"]
    assert ours == theirs
    assert len(ours) > 2
