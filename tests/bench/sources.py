"""Checkpoints for the benchmarks: Qwen3-like folders of any size with reproducible bytes.

Weights are slices of one pool of normal BF16 numbers: to a kernel, a hash and a disk they are as
good as fresh ones, and they are made as fast as the disk takes them.
"""

import math
import shutil
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import PYCODE
from support.sparse import write_sparse, write_sparse_folder

POOL = 2**24  # numbers
RUN = 2**21  # numbers taken from one place of the pool; then comes another place
SHARD = 500_000_000
FULL_SIZE_GB = 1.85  # what the goals are for; everything else is scaled with it

Shapes = Mapping[str, tuple[int, ...]]
Sizes = Mapping[str, Any]
HEAD_DIM = 128
COMMON: Sizes = {
    "attention_bias": False,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
# Qwen3-1.7B's layers. The vocabulary is small so that embedding and head have the share of
# Qwen3-8B's, 7 % each.
DENSE: Sizes = {
    **COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
}
# Qwen3-235B-A22B's experts.
MIXTURE: Sizes = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
}


def nbytes_of(shapes: Shapes) -> int:
    """Return the bytes of these tensors in BF16."""
    return sum(2 * math.prod(shape) for shape in shapes.values())


def layer_shapes(
    sizes: Sizes, layer: int, inner: int, parts: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    """Return a layer of Qwen3, with the feed-forward ``parts``, each of ``inner`` numbers."""
    hidden = sizes["hidden_size"]
    queries, keys = (HEAD_DIM * sizes[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_norm": (HEAD_DIM,),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.v_proj": (keys, hidden),
    }
    for part in parts:
        forth = {"down_proj": (hidden, inner), "gate_proj": (inner, hidden)}
        forth["up_proj"] = (inner, hidden)
        shapes |= {f"{part}.{name}": shape for name, shape in forth.items()}
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def outer_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return embedding, head and last norm."""
    matrix = (sizes["vocab_size"], sizes["hidden_size"])
    names = ("lm_head.weight", "model.embed_tokens.weight")
    return {**dict.fromkeys(names, matrix), "model.norm.weight": matrix[1:]}


def fill(path: Path, pool: memoryview) -> None:
    """Write weights into a sparse file; they depend on its name."""
    random = Random(zlib.crc32(path.name.encode()))
    with path.open("r+b") as file:
        start = 8 + struct.unpack("<Q", file.read(8))[0]
        file.seek(start)
        left = path.stat().st_size - start
        while left:
            at = 2 * random.randrange(POOL - RUN)
            left -= file.write(pool[at : at + min(left, 2 * RUN)])


@dataclass(frozen=True)
class Sources:
    """The checkpoints of one run, each written anew; ``size_gb``: of the folder in shards."""

    root: Path
    size_gb: float

    @property
    def scale(self) -> float:
        return min(1.0, self.size_gb / FULL_SIZE_GB)

    @cached_property
    def pool(self) -> memoryview:
        numbers = np.random.default_rng(4).standard_normal(POOL, np.float32) * np.float32(0.02)
        return numbers.astype(ml_dtypes.bfloat16).view(np.uint8).data

    def shards(self) -> Path:
        """Return a dense model of whole layers, two at least."""
        shapes, layers = outer_shapes(DENSE), 0
        while layers < 2 or nbytes_of(shapes) < self.size_gb * 1e9:
            shapes |= layer_shapes(DENSE, layers, DENSE["intermediate_size"], ["mlp"])
            layers += 1
        return self._folder("qwen3", {**DENSE, "num_hidden_layers": layers}, shapes)

    def one_tensor(self) -> Path:
        """Return a folder with nothing but one tensor of 2 GB."""
        shape = (math.ceil(2e9 * self.scale / (2 * 4096)), 4096)
        shapes = {"model.layers.0.mlp.up_proj.weight": shape}
        return self._folder("one-tensor", {**DENSE, "num_hidden_layers": 1}, shapes)

    def mixture(self) -> Path:
        """Return a folder of one layer with one expert group of 3 GB."""
        hidden, inner = MIXTURE["hidden_size"], MIXTURE["moe_intermediate_size"]
        experts = math.ceil(3e9 * self.scale / (2 * 3 * hidden * inner))
        parts = (f"mlp.experts.{number}" for number in range(experts))
        shapes = outer_shapes(MIXTURE) | layer_shapes(MIXTURE, 0, inner, parts)
        shapes["model.layers.0.mlp.gate.weight"] = (experts, hidden)
        config = {**MIXTURE, "num_hidden_layers": 1, "num_experts": experts}
        return self._folder("mixture", config, shapes)

    def many(self, count: int) -> Path:
        """Return a file of ``count`` tensors of 4 KB."""
        names = sorted(f"model.layers.{number}.mlp.up_proj.weight" for number in range(count))
        tensors = dict.fromkeys(names, ("BF16", (32, 64)))
        path = write_sparse(self.root / f"many-{count}.safetensors", tensors)
        fill(path, self.pool)
        return path

    def _folder(self, name: str, config: Sizes, shapes: Shapes) -> Path:
        tensors = {one: ("BF16", shape) for one, shape in sorted(shapes.items())}
        shards = math.ceil(nbytes_of(shapes) / SHARD)
        folder = write_sparse_folder(self.root / name, tensors, config, shards)
        for path in folder.glob("*.safetensors"):
            fill(path, self.pool)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(PYCODE / file, folder / file)
        return folder


def warm(source: Path) -> None:
    """Read a file or all files of a folder, so that they lie in the page cache."""
    for path in sorted(source.iterdir()) if source.is_dir() else [source]:
        with path.open("rb") as file:
            while file.read(2**22):
                pass
