"""Checkpoints for the benchmarks: Qwen3-like folders of any size with reproducible bytes.

Weights are slices of one pool of normal BF16 numbers, from a place that depends on the tensor's
name: to a kernel, a hash and a disk they are as good as fresh ones, and they are made as fast as
the disk takes them.
"""

import json
import math
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "pycode-5m"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
POOL = 2**24  # numbers
RUN = 2**21  # numbers taken from one place of the pool; then comes another place
SHARD = 500_000_000
FULL_SIZE_GB = 1.85  # what the goals are for; everything else is scaled with it

Array = np.ndarray[Any, Any]
Shapes = Mapping[str, tuple[int, ...]]
Sizes = Mapping[str, Any]
HEAD_DIM = 128
# Qwen3-1.7B's layers. The vocabulary is small so that embedding and head have the share of
# Qwen3-8B's, 7 % each.
DENSE: Sizes = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
}
# Qwen3-235B-A22B's experts.
MIXTURE: Sizes = {
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


def attention_shapes(sizes: Sizes, layer: str) -> dict[str, tuple[int, ...]]:
    """Return what a layer of Qwen3 has besides its feed-forward part."""
    hidden = sizes["hidden_size"]
    queries, keys = (HEAD_DIM * sizes[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    return {
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.k_norm.weight": (HEAD_DIM,),
        f"{layer}.self_attn.k_proj.weight": (keys, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, queries),
        f"{layer}.self_attn.q_norm.weight": (HEAD_DIM,),
        f"{layer}.self_attn.q_proj.weight": (queries, hidden),
        f"{layer}.self_attn.v_proj.weight": (keys, hidden),
    }


def feed_forward_shapes(hidden: int, inner: int, prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.down_proj.weight": (hidden, inner),
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
    }


def outer_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return embedding, head and last norm."""
    matrix = (sizes["vocab_size"], sizes["hidden_size"])
    return {
        "lm_head.weight": matrix,
        "model.embed_tokens.weight": matrix,
        "model.norm.weight": matrix[1:],
    }


def dense_shapes(nbytes: float) -> dict[str, tuple[int, ...]]:
    """Return a dense model of at least that many bytes, in whole layers, two at least."""
    shapes, layer = outer_shapes(DENSE), 0
    while layer < 2 or nbytes_of(shapes) < nbytes:
        prefix = f"model.layers.{layer}"
        sizes = DENSE["hidden_size"], DENSE["intermediate_size"]
        shapes |= attention_shapes(DENSE, prefix) | feed_forward_shapes(*sizes, f"{prefix}.mlp")
        layer += 1
    return shapes


def mixture_shapes(nbytes: float) -> dict[str, tuple[int, ...]]:
    """Return a mixture of experts of one layer, whose experts have at least that many bytes."""
    hidden, inner = MIXTURE["hidden_size"], MIXTURE["moe_intermediate_size"]
    experts = math.ceil(nbytes / (2 * 3 * hidden * inner))
    shapes = outer_shapes(MIXTURE) | attention_shapes(MIXTURE, "model.layers.0")
    shapes["model.layers.0.mlp.gate.weight"] = (experts, hidden)
    for expert in range(experts):
        shapes |= feed_forward_shapes(hidden, inner, f"model.layers.0.mlp.experts.{expert}")
    return shapes


def config_of(sizes: Sizes, shapes: Shapes) -> dict[str, Any]:
    gate = shapes.get("model.layers.0.mlp.gate.weight")
    kind: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if gate is not None:
        kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        kind["num_experts"] = gate[0]
    layers = {name.split(".")[2] for name in shapes if name.startswith("model.layers.")}
    return {
        **kind,
        **sizes,
        "attention_bias": False,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "num_hidden_layers": max(1, len(layers)),
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def header_of(shapes: Shapes) -> bytes:
    """Return the header of a .safetensors file of these BF16 tensors, its length included."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def shards_of(shapes: Shapes, limit: int = SHARD) -> list[dict[str, tuple[int, ...]]]:
    """Return the sorted tensors, cut into files of at most ``limit`` bytes or one tensor."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in sorted(shapes.items()):
        if shards[-1] and nbytes_of(shards[-1]) + 2 * math.prod(shape) > limit:
            shards.append({})
        shards[-1][name] = shape
    return shards


class Weights:
    """Normal BF16 numbers by tensor name."""

    @cached_property
    def _pool(self) -> Array:
        numbers = np.random.default_rng(4).standard_normal(POOL, dtype=np.float32) * np.float32(
            0.02
        )
        return numbers.astype(ml_dtypes.bfloat16).view(np.uint16)

    def runs(self, name: str, count: int) -> Iterator[Array]:
        """Yield ``count`` numbers for a tensor, as bit patterns, in runs."""
        state = zlib.crc32(name.encode())
        for done in range(0, count, RUN):
            state = (state * 1664525 + 1013904223) % 2**32
            wanted = min(RUN, count - done)
            start = state % (POOL - wanted + 1)
            yield self._pool[start : start + wanted]


def write_file(path: Path, shapes: Shapes, weights: Weights) -> None:
    with path.open("wb") as file:
        file.write(header_of(shapes))
        for name, shape in shapes.items():
            for run in weights.runs(name, math.prod(shape)):
                file.write(run.data)


def write_folder(folder: Path, sizes: Sizes, shapes: Shapes, weights: Weights) -> None:
    """Write a checkpoint: shards with an index, config, tokenizer."""
    shards = shards_of(shapes)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, shard, weights)
        files |= dict.fromkeys(shard, name)
    index = {
        "metadata": {"total_size": nbytes_of(shapes)},
        "weight_map": dict(sorted(files.items())),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(config_of(sizes, shapes), indent=2))
    for name in TOKENIZER_FILES:
        shutil.copyfile(FIXTURE / name, folder / name)


@dataclass(frozen=True)
class Sources:
    """The checkpoints of one run, each written anew; ``size_gb``: of the folder in shards."""

    root: Path
    size_gb: float

    @property
    def scale(self) -> float:
        return min(1.0, self.size_gb / FULL_SIZE_GB)

    @cached_property
    def weights(self) -> Weights:
        return Weights()

    def shards(self) -> Path:
        return self._folder("qwen3", DENSE, dense_shapes(self.size_gb * 1e9))

    def one_tensor(self) -> Path:
        """Return a folder with nothing but one tensor of 2 GB."""
        cols = 4096
        rows = math.ceil(2e9 * self.scale / (2 * cols))
        return self._folder(
            "one-tensor", DENSE, {"model.layers.0.mlp.up_proj.weight": (rows, cols)}
        )

    def mixture(self) -> Path:
        """Return a folder with one expert group of 3 GB."""
        return self._folder("mixture", MIXTURE, mixture_shapes(3e9 * self.scale))

    def many(self, count: int) -> Path:
        """Return a file of ``count`` tensors of 4 KB."""
        path = self.root / f"many-{count}.safetensors"
        names = sorted(f"model.layers.{number}.mlp.up_proj.weight" for number in range(count))
        write_file(path, dict.fromkeys(names, (32, 64)), self.weights)
        return path

    def _folder(self, name: str, sizes: Sizes, shapes: Shapes) -> Path:
        folder = self.root / name
        folder.mkdir()
        write_folder(folder, sizes, shapes, self.weights)
        return folder


def warm(source: Path) -> None:
    """Read a file or all files of a folder, so that they lie in the page cache."""
    buffer = bytearray(2**22)
    for path in sorted(source.iterdir()) if source.is_dir() else [source]:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
