"""Published checkpoints without their weights: the right headers over sparse data.

The dimensions are those of each repository's config.json; what is stored besides the parameters is
in fixtures/published/README.md. Headers are written here by hand, so that the reader under test has
no part in them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from support import FIXTURES
from support.corpus import INDEX_NAME

COUNTS: dict[str, dict[str, int]] = json.loads(
    (FIXTURES / "published" / "counts.json").read_text("utf-8")
)
ONE_FILE = "model.safetensors"

_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * _BYTES[self.dtype]


def shards(repository: str) -> dict[str, list[Tensor]]:
    """Return the tensors of each file of a repository, in the order of their data."""
    return _MODELS[repository]()


def write(repository: str, folder: Path) -> Path:
    """Write a repository's files into ``folder``, with an index where there are several.

    Return the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = shards(repository)
    for name, tensors in files.items():
        _write_file(folder / name, tensors)
    if len(files) > 1:
        (folder / INDEX_NAME).write_bytes(index(repository))
    return folder


def index(repository: str) -> bytes:
    """Return the index of a repository of several files."""
    files = shards(repository)
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    weight_map = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    return json.dumps(
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
        indent=2,
    ).encode()


def header(tensors: list[Tensor]) -> bytes:
    """Return the header of a file as safetensors writes it, padded with spaces to 8 bytes."""
    document: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        document[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(document, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text) + -len(text) % 8) + text + b" " * (-len(text) % 8)


def _write_file(path: Path, tensors: list[Tensor]) -> None:
    with path.open("wb") as file:
        begin = file.write(header(tensors))
        file.truncate(begin + sum(tensor.nbytes for tensor in tensors))


def _linear(name: str, outputs: int, inputs: int) -> dict[str, Shape]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _tensors(dtype: str, shapes: dict[str, Shape]) -> list[Tensor]:
    return [Tensor(name, dtype, shape) for name, shape in sorted(shapes.items())]


def _gpt2() -> dict[str, list[Tensor]]:
    width, context = 768, 1024
    shapes: dict[str, Shape] = {
        "wte.weight": (50257, width),
        "wpe.weight": (context, width),
        **_norm("ln_f", width),
    }
    for at in (f"h.{layer}" for layer in range(12)):
        # Conv1D: a weight's rows are the inputs.
        shapes |= {
            **_norm(f"{at}.ln_1", width),
            f"{at}.attn.bias": (1, 1, context, context),
            f"{at}.attn.c_attn.weight": (width, 3 * width),
            f"{at}.attn.c_attn.bias": (3 * width,),
            f"{at}.attn.c_proj.weight": (width, width),
            f"{at}.attn.c_proj.bias": (width,),
            **_norm(f"{at}.ln_2", width),
            f"{at}.mlp.c_fc.weight": (width, 4 * width),
            f"{at}.mlp.c_fc.bias": (4 * width,),
            f"{at}.mlp.c_proj.weight": (4 * width, width),
            f"{at}.mlp.c_proj.bias": (width,),
        }
    return {ONE_FILE: _tensors("F32", shapes)}


def _roberta(width: int, layers: int) -> dict[str, list[Tensor]]:
    words, positions = 50265, 514
    shapes: dict[str, Shape] = {
        "roberta.embeddings.word_embeddings.weight": (words, width),
        "roberta.embeddings.position_embeddings.weight": (positions, width),
        "roberta.embeddings.token_type_embeddings.weight": (1, width),
        **_norm("roberta.embeddings.LayerNorm", width),
        **_linear("lm_head.dense", width, width),
        **_norm("lm_head.layer_norm", width),
        "lm_head.bias": (words,),
    }
    for at in (f"roberta.encoder.layer.{layer}" for layer in range(layers)):
        shapes |= {
            **_linear(f"{at}.attention.self.query", width, width),
            **_linear(f"{at}.attention.self.key", width, width),
            **_linear(f"{at}.attention.self.value", width, width),
            **_linear(f"{at}.attention.output.dense", width, width),
            **_norm(f"{at}.attention.output.LayerNorm", width),
            **_linear(f"{at}.intermediate.dense", 4 * width, width),
            **_linear(f"{at}.output.dense", width, 4 * width),
            **_norm(f"{at}.output.LayerNorm", width),
        }
    return {
        ONE_FILE: [
            Tensor("roberta.embeddings.position_ids", "I64", (1, positions)),
            *_tensors("F32", shapes),
        ]
    }


def _distilbert() -> dict[str, list[Tensor]]:
    width, words = 768, 31102
    shapes: dict[str, Shape] = {
        "distilbert.embeddings.word_embeddings.weight": (words, width),
        "distilbert.embeddings.position_embeddings.weight": (512, width),
        **_norm("distilbert.embeddings.LayerNorm", width),
        **_linear("vocab_transform", width, width),
        **_norm("vocab_layer_norm", width),
        "vocab_projector.bias": (words,),
    }
    for at in (f"distilbert.transformer.layer.{layer}" for layer in range(6)):
        shapes |= {
            **_linear(f"{at}.attention.q_lin", width, width),
            **_linear(f"{at}.attention.k_lin", width, width),
            **_linear(f"{at}.attention.v_lin", width, width),
            **_linear(f"{at}.attention.out_lin", width, width),
            **_norm(f"{at}.sa_layer_norm", width),
            **_linear(f"{at}.ffn.lin1", 4 * width, width),
            **_linear(f"{at}.ffn.lin2", width, 4 * width),
            **_norm(f"{at}.output_layer_norm", width),
        }
    return {ONE_FILE: _tensors("F32", shapes)}


def _gpt_neox() -> dict[str, list[Tensor]]:
    """A shard for the embedding, one for each layer, one for the head: 46, as published."""
    width, words, context, layers = 6144, 50432, 2048, 44

    def parts() -> Iterator[list[Tensor]]:
        yield _tensors("F16", {"gpt_neox.embed_in.weight": (words, width)})
        for at in (f"gpt_neox.layers.{layer}" for layer in range(layers)):
            shapes: dict[str, Shape] = {
                **_norm(f"{at}.input_layernorm", width),
                **_norm(f"{at}.post_attention_layernorm", width),
                f"{at}.attention.rotary_emb.inv_freq": (12,),
                **_linear(f"{at}.attention.query_key_value", 3 * width, width),
                **_linear(f"{at}.attention.dense", width, width),
                **_linear(f"{at}.mlp.dense_h_to_4h", 4 * width, width),
                **_linear(f"{at}.mlp.dense_4h_to_h", width, 4 * width),
            }
            yield [
                *_tensors("F16", shapes),
                Tensor(f"{at}.attention.bias", "U8", (1, 1, context, context)),
            ]
        yield _tensors(
            "F16", {**_norm("gpt_neox.final_layer_norm", width), "embed_out.weight": (words, width)}
        )

    return {
        f"model-{number:05}-of-00046.safetensors": tensors
        for number, tensors in enumerate(parts(), 1)
    }


def _bloom_parts(width: int, layers: int, dtype: str) -> Iterator[list[Tensor]]:
    """The embedding, each layer, and the last norm.

    In a layer biases come first, then the MLP's weights.
    """
    embedding: dict[str, Shape] = {
        "word_embeddings.weight": (250_880, width),
        **_norm("word_embeddings_layernorm", width),
    }
    yield _tensors(dtype, embedding)
    for at in (f"h.{layer}" for layer in range(layers)):
        shapes: dict[str, Shape] = {
            **_norm(f"{at}.input_layernorm", width),
            **_norm(f"{at}.post_attention_layernorm", width),
            **_linear(f"{at}.self_attention.query_key_value", 3 * width, width),
            **_linear(f"{at}.self_attention.dense", width, width),
            **_linear(f"{at}.mlp.dense_h_to_4h", 4 * width, width),
            **_linear(f"{at}.mlp.dense_4h_to_h", width, 4 * width),
        }
        yield sorted(
            _tensors(dtype, shapes),
            key=lambda one: (not one.name.endswith("bias"), ".mlp." not in one.name),
        )
    yield _tensors(dtype, _norm("ln_f", width))


def _bloom_in_one(width: int, layers: int) -> dict[str, list[Tensor]]:
    return {ONE_FILE: [tensor for part in _bloom_parts(width, layers, "F16") for tensor in part]}


def _bloom() -> dict[str, list[Tensor]]:
    parts = enumerate(_bloom_parts(14336, 70, "BF16"), 1)
    return {f"model_{number:05}-of-00072.safetensors": tensors for number, tensors in parts}


_MODELS: dict[str, Callable[[], dict[str, list[Tensor]]]] = {
    "gpt2": _gpt2,
    "roberta-base": lambda: _roberta(768, 12),
    "roberta-large": lambda: _roberta(1024, 24),
    "distilbert-base-german-cased": _distilbert,
    "EleutherAI/gpt-neox-20b": _gpt_neox,
    "bigscience/bloom-560m": lambda: _bloom_in_one(1024, 24),
    "bigscience/bloom-3b": lambda: _bloom_in_one(2560, 30),
    "bigscience/bloom": _bloom,
}
