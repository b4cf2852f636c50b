"""Checkpoints of several files, for imports by many workers."""

from itertools import pairwise
from pathlib import Path

from support.checkpoints import normal, write_shards


def sharded_checkpoint(folder: Path, files: int) -> Path:
    """Write a checkpoint of ``files`` shards, of one layer each; return its folder."""
    shapes = {
        "mlp.down_proj.weight": (64, 128),
        "mlp.up_proj.weight": (128, 64),
        "input_layernorm.weight": (64,),
    }
    layers = (f"model.layers.{number}." for number in range(files))
    shards = [{at + part: normal(at + part, *s) for part, s in shapes.items()} for at in layers]
    return write_shards(folder, shards)


def expert_shards(folder: Path, files: int, nbytes: int) -> Path:
    """Write experts in BF16, in ``files`` shards, so that most groups lie in several of them."""
    names = [
        f"model.layers.{layer}.mlp.experts.{number}.up_proj.weight"
        for layer in range(files * 2 // 3)
        for number in range(12)
    ]
    rows = nbytes // (len(names) * 2 * 2048)
    pool = normal("pool", rows + len(names), 2048)
    tensors = [(name, pool[at : at + rows]) for at, name in enumerate(names)]
    cuts = [len(names) * at // files for at in range(files + 1)]
    return write_shards(folder, [dict(tensors[first:last]) for first, last in pairwise(cuts)])
