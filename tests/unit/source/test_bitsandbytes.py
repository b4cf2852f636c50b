"""Checkpoints of bitsandbytes: their shapes are in small tensors, which are read before a plan."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import FIXTURES

from blobstore import Store, import_model, open_model
from blobstore.errors import UnsupportedSourceError

PRODUCERS = FIXTURES / "producers"
MODULE = "model.layers.0.mlp.down_proj"
NESTED = PRODUCERS / "bitsandbytes-nf4-nested"
Tensors = dict[str, torch.Tensor]


def renamed(module: str) -> Tensors:
    tensors = load_file(NESTED / "model.safetensors")
    return {name.replace(MODULE, module): tensor for name, tensor in tensors.items()}


def with_offset(tensors: Tensors, offset: float) -> Tensors:
    (name,) = (name for name in tensors if "quant_state" in name)
    said = json.loads(tensors[name].numpy().tobytes()) | {"nested_offset": offset}
    raw = bytearray(json.dumps(said).encode())
    return tensors | {name: torch.frombuffer(raw, dtype=torch.uint8)}


def write(folder: Path, tensors: Tensors, **config: object) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    said = json.loads((NESTED / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_plain_modules_and_offsets_of_experts(tmp_path: Path, store: Store) -> None:
    """One more letter in a state moves the others."""
    tensors: Tensors = {"lm_head.weight": torch.randn(64, 256).bfloat16()}
    for expert, offset in enumerate((0.5, 0.0625)):
        tensors |= with_offset(renamed(f"model.layers.0.mlp.experts.{expert}.up_proj"), offset)
    source = write(tmp_path / "source", tensors)
    import_model(source, "m", store=store, quant="int8", requantize=True)
    with open_model("m", store=store) as model:
        types = {name: model[name].type_text for name in model}
        means = [np.abs(model[n].dequantize()).mean() for n in sorted(types) if "experts" in n]
    assert all(text.startswith("int8") for text in types.values())
    assert means == sorted(means, reverse=True)
    assert len(means) == 2


def test_models_with_transposed_weights_are_refused(tmp_path: Path, store: Store) -> None:
    source = write(tmp_path / "source", renamed("transformer.h.0.attn.c_attn"), model_type="gpt2")
    with pytest.raises(UnsupportedSourceError, match=r"c_attn.*gpt2"):
        import_model(source, "m", store=store)
    assert not store.manifests.names()
