"""Checkpoints of any size that take no space: true headers, and data that are holes."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blobstore.formats.dtypes import DType

Tensor = tuple[str, tuple[int, ...]]
"""A dtype's name and a shape."""
Tensors = Mapping[str, Tensor]

_BITS = {dtype.value: dtype.bits for dtype in DType}


def header(
    tensors: Tensors, metadata: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], int]:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * _BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return entries, end


def write_sparse(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
    entries, nbytes = header(tensors, metadata)
    text = json.dumps(entries).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + nbytes)
    return path


def write_sparse_folder(
    folder: Path, tensors: Tensors, config: Mapping[str, Any] | None = None, shards: int = 1
) -> Path:
    """Write a checkpoint of one file, or of shards with an index, and return its folder."""
    if config is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_sparse(folder / "model.safetensors", tensors)
        return folder
    places: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        members = dict(list(tensors.items())[number::shards])
        write_sparse(folder / name, members)
        places |= dict.fromkeys(members, name)
    size = sum(math.prod(shape) * _BITS[dtype] // 8 for dtype, shape in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
