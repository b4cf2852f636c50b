"""Small checkpoints, written with the reference library's rules instead of our code."""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
_NAMES = {
    BF16: "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(ml_dtypes.float8_e4m3fnuz): "F8_E4M3FNUZ",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
    **{np.dtype(f"float{bits}"): f"F{bits}" for bits in (16, 32, 64)},
    **{np.dtype(f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)},
    **{np.dtype(f"uint{bits}"): f"U{bits}" for bits in (8, 32)},
}
LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
}


def safetensors_bytes(
    tensors: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str] | None = None
) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    return raw_safetensors(header, data)


def raw_safetensors(header: Mapping[str, Any] | bytes, data: bytes = b"") -> bytes:
    """Return a file with that header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def normal(name: str, *shape: int, dtype: Any = BF16, scale: float = 0.02) -> np.ndarray[Any, Any]:
    """Return normal weights that depend only on ``name`` and shape."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return (generator.standard_normal(shape, dtype=np.float32) * np.float32(scale)).astype(dtype)


def small_tensors() -> dict[str, np.ndarray[Any, Any]]:
    """Return a one-layer model's tensors: an embedding, a norm, three projections, a head."""
    shapes = {
        "lm_head.weight": (96, 64),
        "model.embed_tokens.weight": (96, 64),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.mlp.down_proj.weight": (64, 128),
        "model.layers.0.mlp.up_proj.weight": (128, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
    }
    return {name: normal(name, *shape) for name, shape in shapes.items()}


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``model.safetensors`` and ``config.json`` to ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(
        safetensors_bytes(small_tensors() if tensors is None else tensors)
    )
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG if config is None else config))
    return folder


def write_shards(
    folder: Path,
    shards: Sequence[Mapping[str, np.ndarray[Any, Any]]],
    metadata: Sequence[Mapping[str, str] | None] | None = None,
) -> Path:
    """Write a checkpoint of several files with an index, each with metadata of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        data = safetensors_bytes(tensors, metadata[number] if metadata else None)
        (folder / name).write_bytes(data)
        places |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    return folder
