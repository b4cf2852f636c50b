"""The source checkpoints of fixtures/ollama-records, rewritten byte for byte.

The digests and hashes of the records hold for exactly these bytes: weights are seeded by tensor
name, tensors lie in the order in which they are yielded here, and the JSON documents
(fixtures/ollama-*.json) are stored as they stand.
"""

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from support import FIXTURES, prequantized_sources as prequantized

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
Json = dict[str, Any]

HIDDEN, INTERMEDIATE, VOCABULARY, KEYS, HEAD, EXPERT = 256, 512, 2048, 128, 64, 128
BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
F8 = np.dtype(ml_dtypes.float8_e4m3fn)
_DTYPE_NAMES = {BF16: "BF16", F16: "F16", F32: "F32", F8: "F8_E4M3"}
_DTYPE_NAMES |= {np.dtype(np.uint8): "U8", np.dtype(np.uint32): "U32"}
_DOCUMENTS: dict[str, Json] = json.loads((FIXTURES / "ollama-sources.json").read_text())
_ARCHITECTURES = json.loads((FIXTURES / "ollama-architectures.json").read_text())
"""Configs, and shapes by name, of sources whose architectures have their own policy."""
LLAMA, QWEN3_MOE, FP8 = (_DOCUMENTS[name] for name in ("llama", "qwen3_moe", "fp8"))
_MODELOPT, _COMPRESSED = (_DOCUMENTS[name] for name in ("modelopt", "compressed"))


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to be made: its name, its shape, the mean and deviation of its values, its dtype."""

    name: str
    shape: tuple[int, ...]
    mean: float = 0.0
    deviation: float = 0.02
    dtype: np.dtype[Any] = BF16

    def array(self) -> Array:
        """Return its values: normal, seeded by the name, rounded to its dtype."""
        generator = np.random.default_rng(zlib.crc32(self.name.encode()))
        values = generator.standard_normal(self.shape, dtype=np.float32)
        return (values * self.deviation + self.mean).astype(self.dtype)


def norm(name: str, size: int = HIDDEN) -> Weight:
    """Return the weights of a norm: about 1."""
    return Weight(f"{name}.weight", (size,), mean=1.0, deviation=0.1)


def attention(layer: str, *, norms: bool = False, keys: int = KEYS) -> Iterator[Weight]:
    """Yield the projections of a layer's attention, and the norms of its queries and keys."""
    for projection, rows in (("q", HIDDEN), ("k", keys), ("v", keys), ("o", HIDDEN)):
        yield Weight(f"{layer}.self_attn.{projection}_proj.weight", (rows, HIDDEN))
    if norms:
        yield from (norm(f"{layer}.self_attn.{name}_norm", HEAD) for name in ("q", "k"))


def mlp(prefix: str, size: int, *experts: int) -> Iterator[Weight]:
    """Yield the projections of an MLP, or of a stack of them."""
    yield Weight(f"{prefix}.gate_proj.weight", (*experts, size, HIDDEN))
    yield Weight(f"{prefix}.up_proj.weight", (*experts, size, HIDDEN))
    yield Weight(f"{prefix}.down_proj.weight", (*experts, HIDDEN, size))


def _layers(count: int) -> Iterator[str]:
    return (f"model.layers.{number}" for number in range(count))


def _llama(layers: int, *, biases: bool = False, head: bool = True) -> Iterator[Weight]:
    yield Weight("model.embed_tokens.weight", (VOCABULARY, HIDDEN))
    for layer in _layers(layers):
        yield from (norm(f"{layer}.{name}_layernorm") for name in ("input", "post_attention"))
        yield from attention(layer)
        for name, size in {"q": HIDDEN, "k": KEYS, "v": KEYS}.items():
            if biases:
                yield Weight(f"{layer}.self_attn.{name}_proj.bias", (size,))
        yield from mlp(f"{layer}.mlp", INTERMEDIATE)
    yield norm("model.norm")
    if head:
        yield Weight("lm_head.weight", (VOCABULARY, HIDDEN))


def _qwen3_moe(layers: int, experts: int) -> Iterator[Weight]:
    yield Weight("model.embed_tokens.weight", (VOCABULARY, HIDDEN))
    for layer in _layers(layers):
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
    for layer in _layers(layers):
        yield from attention(layer, norms=True)
        yield norm(f"{layer}.input_layernorm")
        yield Weight(f"{layer}.mlp.gate.weight", (experts, HIDDEN))
        yield from mlp(f"{layer}.mlp.switch_mlp", EXPERT, experts)
    yield norm("model.norm")


def _arrays(weights: Iterable[Weight], dtype: np.dtype[Any] | None = None) -> Tensors:
    return {weight.name: replace(weight, dtype=dtype or weight.dtype).array() for weight in weights}


def _write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        entry = {"dtype": _DTYPE_NAMES[array.dtype], "shape": list(array.shape)}
        header[name] = {**entry, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(array.tobytes() for array in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _write_json(path: Path, document: Json) -> None:
    path.write_text(json.dumps(document, indent=2))


def _tokenizer() -> Json:
    """Return a byte-level BPE tokenizer without merges, as tokenizers 0.23 saves it."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = range(0x100, 0x200 - len(visible))
    alphabet = sorted(map(chr, [*visible, *others]))
    words = ("single_word", "lstrip", "rstrip", "normalized")
    flags = {**dict.fromkeys(words, False), "special": True}
    tokenizer: Json = json.loads(json.dumps(_DOCUMENTS["tokenizer"]))
    tokenizer["added_tokens"] = [
        {"id": 256 + number, "content": token, **flags}
        for number, token in enumerate(("<s>", "</s>"))
    ]
    tokenizer["model"]["vocab"] = {character: number for number, character in enumerate(alphabet)}
    return tokenizer


def _write_documents(folder: Path, config: Json, *, thinks: bool) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    template += "{% if enable_thinking %}<think></think>{% endif %}" * thinks
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    settings = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    ids = {"bos_token_id": 256, "eos_token_id": 257}
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", {**tokens, **settings})
    _write_json(folder / "special_tokens_map.json", tokens)
    _write_json(folder / "generation_config.json", {**ids, "do_sample": True, "temperature": 0.6})
    text = json.dumps(_tokenizer(), indent=2, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Source:
    """A checkpoint: its config.json, its tensors, where its shards start, and what is changed."""

    config: Json
    tensors: Callable[[], Tensors]
    thinks: bool = False
    shards: tuple[int, ...] = ()
    change: Callable[[Path], object] = lambda _: None

    def write(self, folder: Path) -> None:
        _write_documents(folder, self.config, thinks=self.thinks)
        tensors = self.tensors()
        if self.shards:
            _write_shards(folder, tensors, self.shards)
        else:
            _write_safetensors(folder / "model.safetensors", tensors)
        self.change(folder)


def _write_shards(folder: Path, tensors: Tensors, starts: Sequence[int]) -> None:
    """Write one shard for each position in ``starts``, and the index."""
    names = list(tensors)
    shard_of: dict[str, str] = {}
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], None], strict=True), 1):
        shard = f"model-{number:05d}-of-{len(starts):05d}.safetensors"
        _write_safetensors(folder / shard, {name: tensors[name] for name in names[start:stop]})
        shard_of |= dict.fromkeys(names[start:stop], shard)
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _config(layers: int, **more: Any) -> Json:
    return {**LLAMA, "num_hidden_layers": layers, **more}


def _plain(
    config: Json, weights: Callable[..., Iterator[Weight]], *args: Any, **how: Any
) -> Source:
    return Source(config, lambda: _arrays(weights(*args, **how)))


def _dense(layers: int, dtype: np.dtype[Any] | None = None, **more: Any) -> Source:
    return Source(_config(layers, **more), lambda: _arrays(_llama(layers), dtype))


def _mixture(layers: int, experts: int, **more: Any) -> Source:
    config = {**QWEN3_MOE, "num_experts": experts}
    return Source(config, lambda: _arrays(_qwen3_moe(layers, experts)), **more)


def _mlx(group_size: int, bits: int, **more: Any) -> Source:
    """Return an MLX-quantized model of two layers; ``more`` as in its config.json."""
    settings = {"group_size": group_size, "bits": bits, **more}
    usual = (group_size, bits, more.get("mode", "affine"))
    others = {"lm_head.weight": (64, 8, "affine")} if "lm_head" in more else {}
    return Source(
        _config(2, quantization=settings, quantization_config=settings),
        lambda: prequantized.mlx_model(_arrays(_llama(2)), usual, others),
    )


def _fp8(layers: int, **options: Any) -> Source:
    """Return a block FP8 model; ``options`` as `prequantized_sources.fp8_model`."""
    return Source(
        _config(layers, quantization_config=FP8),
        lambda: prequantized.fp8_model(_arrays(_llama(layers)), **options),
    )


def _nvfp4(layers: int, settings: Json, change: Callable[[Path], object] = str) -> Source:
    """Return an NVFP4 model of ModelOpt or of compressed-tensors."""
    is_modelopt = settings is _MODELOPT
    return Source(
        _config(layers, quantization_config=settings),
        lambda: prequantized.nvfp4_model(_arrays(_llama(layers)), modelopt=is_modelopt),
        change=change,
    )


def _of_architecture(config: Json, shapes: dict[str, list[int]]) -> Source:
    """Return a source whose norms are about 1."""

    def weight(name: str) -> Weight:
        if "norm" in name:
            return norm(name.removesuffix(".weight"), *shapes[name])
        is_f32 = name.endswith((".A_log", ".e_score_correction_bias"))
        return Weight(name, tuple(shapes[name]), dtype=F32 if is_f32 else BF16)

    return Source(config, lambda: _arrays(map(weight, shapes)))


def _beside(file: str, name: str, weight: Weight) -> Callable[[Path], None]:
    return lambda folder: _write_safetensors(folder / file, {name: weight.array()})


def _cohere2_moe() -> Tensors:
    tensors = _arrays(_qwen3_moe(9, 4))
    del tensors["lm_head.weight"]
    return tensors


_COHERE2 = {
    **QWEN3_MOE,
    "architectures": ["Cohere2MoeForCausalLM"],
    "model_type": "cohere2_moe",
    "num_hidden_layers": 9,
    "num_experts": 4,
}

SOURCES = {
    "a_dense_bf16": _dense(4),
    "a_dense_bias_tied": _plain(
        _config(2, tie_word_embeddings=True), _llama, 2, biases=True, head=False
    ),
    "b_qwen3_moe": _mixture(2, 12, thinks=True),
    "b_switch_mlp_stacked": _plain({**QWEN3_MOE, "num_experts": 8}, _switch_mlp, 2, 8),
    "c_sharded": replace(
        _dense(4),
        shards=(0, 10, 25),
        change=_beside("consolidated.safetensors", "tok_embeddings.weight", Weight("x", (16, 16))),
    ),
    "d_mlx_int4": _mlx(64, 4),
    "d_mlx_int4_g32": _mlx(32, 4),
    "d_mlx_int8": _mlx(64, 8, mode="affine"),
    "d_mlx_mixed_4_8": _mlx(64, 4, mode="affine", lm_head={"group_size": 64, "bits": 8}),
    "d_mlx_mxfp4": _mlx(32, 4, mode="mxfp4"),
    "d_mlx_nvfp4": _mlx(16, 4, mode="nvfp4"),
    "e_fp8_block": _fp8(4),
    "e_fp8_block_bf16scale": _fp8(1, scale_dtype=BF16),
    "e_fp8_moe": Source(
        {**QWEN3_MOE, "quantization_config": FP8},
        lambda: prequantized.fp8_model(_arrays(_qwen3_moe(2, 11))),
    ),
    "f_ct_nvfp4": _nvfp4(2, _COMPRESSED),
    "f_modelopt_nvfp4": _nvfp4(
        2,
        _MODELOPT,
        lambda folder: _write_json(
            folder / "hf_quant_config.json",
            {"quantization": {"quant_algo": "NVFP4", "group_size": 16}},
        ),
    ),
    "g_f16": _dense(4, F16, torch_dtype="float16"),
    "g_f32": _dense(2, F32, torch_dtype="float32"),
    "h_cohere2_moe": Source(_COHERE2, _cohere2_moe),
    **{name: _of_architecture(**rows) for name, rows in _ARCHITECTURES.items()},
    "z_draft": _dense(1),
}


def write_source(root: Path, name: str) -> Path:
    """Write the source checkpoint of that name to ``root``/``name``, and return the folder."""
    folder = root / name
    folder.mkdir(parents=True)
    SOURCES[name].write(folder)
    return folder
