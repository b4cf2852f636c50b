"""The source checkpoints of fixtures/ollama-records, rewritten byte for byte.

The digests and hashes of the records hold for exactly these bytes: weights are seeded by tensor
name, tensors lie in the order in which they are yielded here, and the JSON documents are stored as
they stand.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from support import architecture_sources as architectures, prequantized_sources as prequantized
from support.ollama_weights import (
    BF16,
    EXPERT,
    F16,
    F32,
    HIDDEN,
    INTERMEDIATE,
    KEYS,
    VOCABULARY,
    Array,
    Weight,
    attention,
    mlp,
    norm,
)

Tensors = dict[str, Array]
Json = dict[str, Any]

INDEX = "model.safetensors.index.json"
F8, F8_E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
_DTYPE_NAMES = {BF16: "BF16", F16: "F16", F32: "F32", F8: "F8_E4M3", F8_E5M2: "F8_E5M2"}
_DTYPE_NAMES |= {np.dtype(np.uint8): "U8", np.dtype(np.uint32): "U32"}

LLAMA: Json = json.loads("""{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048,
    "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "bos_token_id": 256, "eos_token_id": 257, "hidden_act": "silu"
}""")
QWEN3_MOE: Json = json.loads("""{
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128, "num_experts": 12, "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 4096, "norm_topk_prob": true,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": false
}""")
_TOKENIZER = """{
    "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
    "use_regex": true},
    "post_processor": null,
    "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
    "use_regex": true},
    "model": {
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null,
        "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": {}, "merges": []
    }
}"""


def _llama(layers: int, *, biases: bool = False, head: bool = True) -> Iterator[Weight]:
    yield Weight("model.embed_tokens.weight", (VOCABULARY, HIDDEN))
    for layer in (f"model.layers.{number}" for number in range(layers)):
        yield from (norm(f"{layer}.{name}_layernorm") for name in ("input", "post_attention"))
        yield from attention(layer)
        if biases:
            sizes = {"q": HIDDEN, "k": KEYS, "v": KEYS}
            yield from (
                Weight(f"{layer}.self_attn.{name}_proj.bias", (size,))
                for name, size in sizes.items()
            )
        yield from mlp(f"{layer}.mlp", INTERMEDIATE)
    yield norm("model.norm")
    if head:
        yield Weight("lm_head.weight", (VOCABULARY, HIDDEN))


def _qwen3_moe(layers: int, experts: int) -> Iterator[Weight]:
    yield Weight("model.embed_tokens.weight", (VOCABULARY, HIDDEN))
    for layer in (f"model.layers.{number}" for number in range(layers)):
        yield from attention(layer, norms=True)
        yield from (norm(f"{layer}.{name}_layernorm") for name in ("input", "post_attention"))
        yield Weight(f"{layer}.mlp.gate.weight", (experts, HIDDEN))
        for expert in range(experts):
            yield from mlp(f"{layer}.mlp.experts.{expert}", EXPERT)
        yield from mlp(f"{layer}.mlp.shared_experts", EXPERT)
        yield Weight(f"{layer}.mlp.shared_expert_gate.weight", (1, HIDDEN))
    yield norm("model.norm")
    yield Weight("lm_head.weight", (VOCABULARY, HIDDEN))


def _switch_mlp(layers: int, experts: int) -> Iterator[Weight]:
    yield Weight("model.embed_tokens.weight", (VOCABULARY, HIDDEN))
    for layer in (f"model.layers.{number}" for number in range(layers)):
        yield from attention(layer, norms=True)
        yield norm(f"{layer}.input_layernorm")
        yield Weight(f"{layer}.mlp.gate.weight", (experts, HIDDEN))
        yield from mlp(f"{layer}.mlp.switch_mlp", EXPERT, experts)
    yield norm("model.norm")


def _arrays(weights: Iterator[Weight], dtype: np.dtype[Any] | None = None) -> Tensors:
    return {weight.name: replace(weight, dtype=dtype or weight.dtype).array() for weight in weights}


def _write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(
        struct.pack("<Q", len(text))
        + text
        + b"".join(array.tobytes() for array in tensors.values())
    )


def _write_json(path: Path, document: Json) -> None:
    path.write_text(json.dumps(document, indent=2))


def _tokenizer() -> Json:
    """Return a byte-level BPE tokenizer without merges, as tokenizers 0.23 saves it."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = sorted(
        [*map(chr, visible), *(chr(0x100 + number) for number in range(256 - len(visible)))]
    )
    tokenizer: Json = json.loads(_TOKENIZER)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {
        "special": True
    }
    tokenizer["added_tokens"] = [
        {"id": 256, "content": "<s>", **flags},
        {"id": 257, "content": "</s>", **flags},
    ]
    tokenizer["model"]["vocab"] = {character: number for number, character in enumerate(alphabet)}
    return tokenizer


def _write_documents(folder: Path, config: Json, *, thinks: bool) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    template += "{% if enable_thinking %}<think></think>{% endif %}" * thinks
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer_config = {
        **tokens,
        "chat_template": template,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation_config = {
        "bos_token_id": 256,
        "eos_token_id": 257,
        "do_sample": True,
        "temperature": 0.6,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "special_tokens_map.json", tokens)
    _write_json(folder / "generation_config.json", generation_config)
    (folder / "tokenizer.json").write_text(
        json.dumps(_tokenizer(), indent=2, ensure_ascii=False), encoding="utf-8"
    )


def _whole(folder: Path, config: Json, tensors: Tensors, *, thinks: bool = False) -> None:
    _write_documents(folder, config, thinks=thinks)
    _write_safetensors(folder / "model.safetensors", tensors)


def _sharded(folder: Path, layers: int, starts: Sequence[int]) -> None:
    """Write one shard for each position in ``starts``, and the index."""
    _write_documents(folder, LLAMA, thinks=False)
    tensors = _arrays(_llama(layers))
    names = list(tensors)
    shard_of: dict[str, str] = {}
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], None], strict=True), 1):
        shard = f"model-{number:05d}-of-{len(starts):05d}.safetensors"
        _write_safetensors(folder / shard, {name: tensors[name] for name in names[start:stop]})
        shard_of |= dict.fromkeys(names[start:stop], shard)
    total = sum(array.nbytes for array in tensors.values())
    _write_json(
        folder / INDEX,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))},
    )


def _c_sharded(folder: Path) -> None:
    _sharded(folder, 4, (0, 10, 25))
    _write_safetensors(
        folder / "consolidated.safetensors",
        {"tok_embeddings.weight": Weight("x", (16, 16)).array()},
    )


def _x_ambiguous(folder: Path) -> None:
    _whole(folder, LLAMA, _arrays(_llama(1)))
    _write_safetensors(
        folder / "model-00001-of-00001.safetensors", {"a.weight": Weight("a", (4, 4)).array()}
    )


def _x_index_missing_shard(folder: Path) -> None:
    _sharded(folder, 1, (0, 5))
    (folder / "model-00002-of-00002.safetensors").unlink()


def _x_index_badpath(folder: Path) -> None:
    _sharded(folder, 1, (0, 5))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.embed_tokens.weight"] = "../evil.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def _x_expert_mismatch(folder: Path) -> None:
    tensors = _arrays(_qwen3_moe(1, 4))
    odd = "model.layers.0.mlp.experts.2.up_proj.weight"
    tensors[odd] = tensors[odd][:64]
    _whole(folder, {**QWEN3_MOE, "num_experts": 4}, tensors)


def _h_cohere2_moe(folder: Path) -> None:
    names = {"architectures": ["Cohere2MoeForCausalLM"], "model_type": "cohere2_moe"}
    tensors = _arrays(_qwen3_moe(9, 4))
    del tensors["lm_head.weight"]
    _whole(folder, {**QWEN3_MOE, **names, "num_hidden_layers": 9, "num_experts": 4}, tensors)


def _x_truncated_data(folder: Path) -> None:
    _whole(folder, {**LLAMA, "num_hidden_layers": 1}, _arrays(_llama(1)))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100_000])


FP8: Json = json.loads(
    '{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", '
    '"weight_block_size": [128, 128]}'
)
_MODELOPT: Json = json.loads(
    '{"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}'
)
_COMPRESSED: Json = json.loads("""{
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {
        "format": "nvfp4-pack-quantized",
        "weights": {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    }}
}""")
_MIXED: Json = {
    "group_size": 64,
    "bits": 4,
    "mode": "affine",
    "lm_head": {"group_size": 64, "bits": 8},
}


def _mlx(group_size: int, bits: int, mode: str, settings: Json) -> Callable[[Path], None]:
    """Return the writer of an MLX-quantized model of two layers with these ``settings``."""

    def write(folder: Path) -> None:
        others = {"lm_head.weight": (64, 8, "affine")} if "lm_head" in settings else {}
        config = {
            **LLAMA,
            "num_hidden_layers": 2,
            "quantization": settings,
            "quantization_config": settings,
        }
        _whole(
            folder,
            config,
            prequantized.mlx_model(_arrays(_llama(2)), (group_size, bits, mode), others),
        )

    return write


def _fp8(layers: int, settings: Json | None = FP8, **options: Any) -> Callable[[Path], None]:
    """Return the writer of a block FP8 model; ``options`` as `block_fp8`."""

    def write(folder: Path) -> None:
        config = (
            LLAMA
            if layers == LLAMA["num_hidden_layers"]
            else {**LLAMA, "num_hidden_layers": layers}
        )
        config = config if settings is None else {**config, "quantization_config": settings}
        _whole(folder, config, prequantized.fp8_model(_arrays(_llama(layers)), **options))

    return write


def _e_fp8_moe(folder: Path) -> None:
    _whole(
        folder,
        {**QWEN3_MOE, "quantization_config": FP8},
        prequantized.fp8_model(_arrays(_qwen3_moe(2, 11))),
    )


def _f_modelopt_nvfp4(folder: Path) -> None:
    tensors = prequantized.nvfp4_model(_arrays(_llama(2)), modelopt=True)
    _whole(folder, {**LLAMA, "num_hidden_layers": 2, "quantization_config": _MODELOPT}, tensors)
    _write_json(
        folder / "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    )


def _f_ct_nvfp4(folder: Path) -> None:
    tensors = prequantized.nvfp4_model(_arrays(_llama(2)), modelopt=False)
    _whole(folder, {**LLAMA, "num_hidden_layers": 2, "quantization_config": _COMPRESSED}, tensors)


def _x_collision(folder: Path) -> None:
    tensors = prequantized.nvfp4_model(_arrays(_llama(1)), modelopt=False)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = Weight("q", (HIDDEN, HIDDEN)).array()
    _whole(folder, {**LLAMA, "num_hidden_layers": 1, "quantization_config": _COMPRESSED}, tensors)


def _x_fp8_e5m2(folder: Path) -> None:
    tensors = prequantized.fp8_model(_arrays(_llama(1)))
    tensors["model.layers.0.self_attn.q_proj.weight"] = (
        Weight("z", (HIDDEN, HIDDEN)).array().astype(F8_E5M2)
    )
    _whole(folder, {**LLAMA, "num_hidden_layers": 1, "quantization_config": FP8}, tensors)


_TIED = {**LLAMA, "num_hidden_layers": 2, "tie_word_embeddings": True}
_DRAFT = {**LLAMA, "num_hidden_layers": 1}
_SINGLE = {**LLAMA, "num_hidden_layers": 2, "torch_dtype": "float32"}

SOURCES: dict[str, Callable[[Path], None]] = {
    "a_dense_bf16": lambda folder: _whole(folder, LLAMA, _arrays(_llama(4))),
    "a_dense_bias_tied": lambda folder: _whole(
        folder, _TIED, _arrays(_llama(2, biases=True, head=False))
    ),
    "b_qwen3_moe": lambda folder: _whole(
        folder, QWEN3_MOE, _arrays(_qwen3_moe(2, 12)), thinks=True
    ),
    "b_switch_mlp_stacked": lambda folder: _whole(
        folder, {**QWEN3_MOE, "num_experts": 8}, _arrays(_switch_mlp(2, 8))
    ),
    "c_sharded": _c_sharded,
    "d_mlx_int4": _mlx(64, 4, "affine", {"group_size": 64, "bits": 4}),
    "d_mlx_int4_g32": _mlx(32, 4, "affine", {"group_size": 32, "bits": 4}),
    "d_mlx_int8": _mlx(64, 8, "affine", {"group_size": 64, "bits": 8, "mode": "affine"}),
    "d_mlx_mixed_4_8": _mlx(64, 4, "affine", _MIXED),
    "d_mlx_mxfp4": _mlx(32, 4, "mxfp4", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    "d_mlx_nvfp4": _mlx(16, 4, "nvfp4", {"group_size": 16, "bits": 4, "mode": "nvfp4"}),
    "e_fp8_block": _fp8(4),
    "e_fp8_block_bf16scale": _fp8(1, scale_dtype=BF16),
    "e_fp8_moe": _e_fp8_moe,
    "f_ct_nvfp4": _f_ct_nvfp4,
    "f_modelopt_nvfp4": _f_modelopt_nvfp4,
    "g_f16": lambda folder: _whole(
        folder, {**LLAMA, "torch_dtype": "float16"}, _arrays(_llama(4), F16)
    ),
    "g_f32": lambda folder: _whole(folder, _SINGLE, _arrays(_llama(2), F32)),
    "h_cohere2_moe": _h_cohere2_moe,
    "h_gemma4": lambda folder: _whole(
        folder, architectures.gemma4_config(10), _arrays(architectures.gemma4(10))
    ),
    "h_gemma4_moe8": lambda folder: _whole(
        folder,
        architectures.gemma4_config(4, 8),
        _arrays(architectures.gemma4(4, experts=8, keys=64)),
    ),
    "h_nemotron_h": lambda folder: _whole(
        folder, architectures.NEMOTRON_H, _arrays(architectures.nemotron_h())
    ),
    "h_qwen3_5_moe": lambda folder: _whole(
        folder, architectures.QWEN35_MOE, _arrays(architectures.qwen35_moe())
    ),
    "x_ambiguous": _x_ambiguous,
    "x_collision": _x_collision,
    "x_expert_mismatch": _x_expert_mismatch,
    "x_fp8_64": _fp8(1, {**FP8, "weight_block_size": [64, 64]}, block=64),
    "x_fp8_e5m2": _x_fp8_e5m2,
    "x_fp8_noblock": _fp8(1, None),
    "x_index_badpath": _x_index_badpath,
    "x_index_missing_shard": _x_index_missing_shard,
    "x_no_tensors": lambda folder: _whole(folder, LLAMA, {}),
    "x_truncated_data": _x_truncated_data,
    "z_draft": lambda folder: _whole(folder, _DRAFT, _arrays(_llama(1))),
}


def write_source(root: Path, name: str) -> Path:
    """Write the source checkpoint of that name to ``root``/``name``, and return the folder."""
    folder = root / name
    folder.mkdir(parents=True)
    SOURCES[name](folder)
    return folder
