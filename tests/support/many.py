"""Checkpoints of several files, for imports by many workers."""

from __future__ import annotations

import json
from pathlib import Path

from support.checkpoints import LLAMA_CONFIG, normal, safetensors_bytes


def sharded_checkpoint(folder: Path, files: int) -> Path:
    """Write a checkpoint of ``files`` shards, of one layer each; return its folder."""
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        shapes = {
            f"model.layers.{number}.mlp.down_proj.weight": (64, 128),
            f"model.layers.{number}.mlp.up_proj.weight": (128, 64),
            f"model.layers.{number}.input_layernorm.weight": (64,),
        }
        tensors = {one: normal(one, *shape) for one, shape in shapes.items()}
        (folder / name).write_bytes(safetensors_bytes(tensors))
        weight_map |= dict.fromkeys(tensors, name)
    _write_index(folder, weight_map)
    return folder


def expert_shards(folder: Path, files: int, nbytes: int) -> Path:
    """Write a checkpoint of experts in BF16, evenly in ``files`` shards; return its folder.

    There are one and a half times as many shards as layers, so most groups lie in several shards.
    """
    folder.mkdir(parents=True)
    layers, experts = files * 2 // 3, 12
    rows = nbytes // (layers * experts * 2 * 2048)
    pool = normal("pool", rows + experts * layers, 2048)
    names = [
        f"model.layers.{layer}.mlp.experts.{number}.up_proj.weight"
        for layer in range(layers)
        for number in range(experts)
    ]
    weight_map: dict[str, str] = {}
    for file in range(files):
        first, last = (len(names) * at // files for at in (file, file + 1))
        tensors = {names[n]: pool[n : n + rows] for n in range(first, last)}
        name = f"model-{file + 1:05}-of-{files:05}.safetensors"
        (folder / name).write_bytes(safetensors_bytes(tensors))
        weight_map |= dict.fromkeys(tensors, name)
    _write_index(folder, weight_map)
    return folder


def _write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
