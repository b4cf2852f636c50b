"""Made-up models of very many tensors: a real manifest, real headers, few bytes each."""

import json
from typing import Any

import numpy as np

from blobstore.store.local.store import Store
from support.checkpoints import normal, safetensors_bytes
from support.stores import layer_by_hand, write_manifest

_EXPERTS = 128
_ROWS, _COLS = 2, 64
_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": _COLS,
    "max_position_embeddings": 32_768,
}


def large_model(store: Store, name: str, tensors: int, *, together: int = 1) -> None:
    """Write a model of int4 experts and BF16 norms, ``together`` tensors in each blob."""
    names = [_name(index) for index in range(tensors)]
    layers = []
    for start in range(0, tensors, together):
        some = names[start : start + together]
        layers.append(layer_by_hand(store, some[0], blob_of(some, name)))
    config = layer_by_hand(store, "", json.dumps({"file_type": "int4"}).encode())
    del config["name"]
    document = layer_by_hand(store, "config.json", json.dumps(_CONFIG).encode())
    manifest = {
        "schemaVersion": 2,
        "config": config | {"mediaType": "application/vnd.docker.container.image.v1+json"},
        "layers": [document | {"mediaType": "application/vnd.ollama.image.json"}, *layers],
    }
    write_manifest(store, name, json.dumps(manifest))


def _name(index: int) -> str:
    """Return a name as of a mixture of experts: three of each expert, a norm of each layer."""
    layer, place = divmod(index, 3 * _EXPERTS + 1)
    if place == 3 * _EXPERTS:
        return f"model.layers.{layer}.input_layernorm.weight"
    part = ("gate_proj", "up_proj", "down_proj")[place % 3]
    return f"model.layers.{layer}.mlp.experts.{place // 3}.{part}.weight"


def blob_of(names: list[str], salt: str) -> bytes:
    """Return a blob with these tensors; its bytes follow from the names and the salt."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    metadata: dict[str, str] = {}
    for name in names:
        if "norm" in name:
            arrays[name] = normal(name + salt, _COLS)
            continue
        arrays[name] = normal(name + salt, _ROWS, _COLS // 4).view(np.uint32)
        for part in (".scale", ".bias"):
            arrays[name + part] = normal(name + part + salt, _ROWS, 1)
        prefix = f"{name}." if len(names) > 1 else ""
        metadata |= {f"{prefix}quant_type": "int4", f"{prefix}group_size": f"{_COLS}"}
    return safetensors_bytes(arrays, metadata)
