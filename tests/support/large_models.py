"""Made-up models of very many tensors: a real manifest, real headers, few bytes each."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator

from blobstore.store.local.store import Store
from support.checkpoints import raw_safetensors
from support.stores import layer_by_hand, manifest_path

_EXPERTS = 128
_ROWS, _COLS, _GROUP = 2, 64, 64
_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": _COLS,
    "max_position_embeddings": 32_768,
}


def large_model(store: Store, name: str, tensors: int, *, together: int = 1) -> None:
    """Write a model of int4 experts and BF16 norms, ``together`` tensors in each blob."""
    names = list(tensor_names(tensors))
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
    path = manifest_path(store, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest))


def tensor_names(number: int) -> Iterator[str]:
    """Yield names as a mixture of experts has them: three of each expert, a norm of each layer."""
    for index in range(number):
        layer, place = divmod(index, 3 * _EXPERTS + 1)
        if place == 3 * _EXPERTS:
            yield f"model.layers.{layer}.input_layernorm.weight"
        else:
            expert, which = divmod(place, 3)
            projection = ("gate_proj", "up_proj", "down_proj")[which]
            yield f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"


def blob_of(names: list[str], salt: str) -> bytes:
    """Return a blob with these tensors; its bytes follow from the names and the salt."""
    entries: dict[str, object] = {}
    metadata: dict[str, str] = {}
    parts: list[bytes] = []
    offset = 0
    for name in names:
        for suffix, dtype, shape, nbytes in _arrays(name):
            key = f"{name}{suffix}"
            entries[key] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [offset, offset + nbytes],
            }
            parts.append(_data(key + salt, dtype, nbytes))
            offset += nbytes
        if "norm" not in name:
            prefix = f"{name}." if len(names) > 1 else ""
            metadata |= {f"{prefix}quant_type": "int4", f"{prefix}group_size": str(_GROUP)}
    header = {"__metadata__": metadata, **entries} if metadata else entries
    return raw_safetensors(header, b"".join(parts))


def _arrays(name: str) -> list[tuple[str, str, list[int], int]]:
    if "norm" in name:
        return [("", "BF16", [_COLS], 2 * _COLS)]
    scales = [_ROWS, _COLS // _GROUP]
    return [
        ("", "U32", [_ROWS, _COLS // 8], _ROWS * _COLS // 2),
        (".scale", "BF16", scales, 2 * _ROWS),
        (".bias", "BF16", scales, 2 * _ROWS),
    ]


def _data(seed: str, dtype: str, nbytes: int) -> bytes:
    """Return bytes that follow from the seed; BF16 ones are finite."""
    raw = hashlib.shake_128(seed.encode()).digest(nbytes)
    if dtype != "BF16":
        return raw
    halves = struct.unpack(f"<{nbytes // 2}H", raw)
    return struct.pack(f"<{nbytes // 2}H", *(0x3C00 | half & 0x807F for half in halves))
