"""What tests of exports share: sources of several files, and comparisons of folders and stores."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

import blobstore
from blobstore.formats.documents import Manifest
from blobstore.store.local.store import Store
from support.checkpoints import normal

Array = np.ndarray[Any, Any]
Raw = dict[str, tuple[str, tuple[int, ...], bytes]]


def mixture_tensors(dtype: Any = ml_dtypes.bfloat16) -> dict[str, Array]:
    """Return two layers with four numbered experts each, a gate, a norm and some integers."""
    tensors = {
        "model.embed_tokens.weight": normal("embed", 96, 64, dtype=dtype),
        "steps": np.arange(5, dtype=np.int64),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}norm.weight"] = normal(prefix, 64, dtype=dtype)
        tensors[f"{prefix}mlp.gate.weight"] = normal(f"{prefix}g", 4, 64, dtype=dtype)
        for expert in range(4):
            for projection, shape in {"up_proj": (128, 64), "down_proj": (64, 128)}.items():
                name = f"{prefix}mlp.experts.{expert}.{projection}.weight"
                tensors[name] = normal(name, *shape, dtype=dtype)
    return tensors


def raw_tensors(folder: Path) -> Raw:
    found: Raw = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = raw_tensors_of(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def raw_tensors_of(path: Path) -> Raw:
    found: Raw = {}
    with safe_open(path, "np"):
        raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = (entry["dtype"], tuple(entry["shape"]), raw[start + begin : start + end])
    return found


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "np") as opened:
        return opened.metadata() or {}


def tensor_layers(manifest: Manifest) -> list[tuple[str | None, str]]:
    return [(layer.name, str(layer.digest)) for layer in manifest.tensor_layers]


def imported_again(store: Store, name: str, folder: Path, **options: Any) -> Manifest:
    """Export a model to ``folder``, import that, and return the manifest of what it became."""
    blobstore.export_model(name, folder, store=store)
    return blobstore.import_model(folder, "again", store=store, **options).manifest
