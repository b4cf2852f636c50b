"""Documents of a GGUF file: config.json and the tokenizer's files, made from its metadata.

Pure: the same header gives the same bytes. Only what llama.cpp, transformers and mlx-lm agree on is
made; all else is refused, and asked for as a folder (``config=DIR``).

Sources, all in ggml-org/llama.cpp as shipped in llama-cpp-python 0.3.36:

- keys: gguf-py/gguf/constants.py `Keys`. The converters that write them: conversion/base.py
  `TextModel.set_gguf_parameters`, conversion/{llama,qwen,gemma,phi,gpt_oss}.py. The defaults of
  missing ones: src/llama-model.cpp `load_hparams`, src/models/{gemma2,gemma3,qwen2moe,qwen3moe}.cpp
- byte-level BPE: src/llama-vocab.cpp `llm_tokenizer_bpe` (the regular expressions of the models'
  own tokenizer.json are in its comments), `llama_vocab::impl::load` (which names stand for which)
- SentencePiece: `llm_tokenizer_spm_session`: the pair whose union has the highest score is merged
  first. transformers 5.24.0 integrations/gguf/gguf_tokenizer_mapping.py `gemma_tokenizer`: Gemma's
  order is that of its tokens, whose scores converters have lost, and its runs of spaces are written
  as spaces. Which tokens end a text: `special_eog_ids`.
- files: huggingface/tokenizers 0.23.3 tokenizers/src/models/bpe/serialization.rs.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np

from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.formats.checkpoint import CONFIG_NAME, TOKENIZER
from blobstore.formats.gguf import GgufHeader
from blobstore.source.gguf import model_dtype

_T = TypeVar("_T")
Json = dict[str, Any]
# Returns the values of a small F32 tensor of the file, by its name.
_ReadFloats = Callable[[str], Sequence[float]]

_NO_ID, _LIMIT = 2**32 - 1, 2.0**127
# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# Of all tokens from which merges are made; Gemma 3's have 2,100,000.
_MAX_CHARACTERS = 20_000_000
# The role of a token → its name in the metadata.
_ROLES: Final = {role: role for role in ("bos", "eos", "eot", "eom")} | {
    "unk": "unknown",
    "pad": "padding",
}
_ENDS = frozenset(
    ["</s>", "<eos>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>"]
    + [f"<|{end}|>" for end in ("eot_id", "eom_id", "end", "return", "call")]
)


class _Key(NamedTuple):
    """A value of the metadata, after the architecture's name.

    ``default``: what stands for 0 and for a missing value; it is refused if that is ``...``.
    """

    name: str
    default: Any = ...
    kind: type[Any] = int


_COMMON: Final = {
    "hidden_size": _Key("embedding_length"),
    "intermediate_size": _Key("feed_forward_length"),
    "num_hidden_layers": _Key("block_count"),
    "num_attention_heads": _Key("attention.head_count"),
    "num_key_value_heads": _Key("attention.head_count_kv", 0),
    "head_dim": _Key("attention.key_length", 0),
    "max_position_embeddings": _Key("context_length"),
    "rms_norm_eps": _Key("attention.layer_norm_rms_epsilon", kind=float),
    "rope_theta": _Key("rope.freq_base", 10_000.0, float),
    "hidden_act": "silu",
}
_SPARSE: Final = {
    "num_experts": _Key("expert_count"),
    "num_experts_per_tok": _Key("expert_used_count"),
    "moe_intermediate_size": _Key("expert_feed_forward_length"),
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_GEMMA: Final = {
    "sliding_window": _Key("attention.sliding_window"),
    **dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
}
# The config.json of each architecture, besides what all have and what tensors say.
_CONFIGS: Final[Mapping[str, Json]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": False,
    },
    "qwen2moe": {
        **_SPARSE,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": _Key("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    },
    "qwen3moe": {
        **_SPARSE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
    },
    "gemma2": {
        **_GEMMA,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": _Key("attn_logit_softcapping", 50.0, float),
        "final_logit_softcapping": _Key("final_logit_softcapping", 30.0, float),
    },
    "gemma3": {
        **_GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window_pattern": _Key("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": _Key("rope.freq_base_swa", 10_000.0, float),
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "original_max_position_embeddings": _Key("rope.scaling.original_context_length"),
        "sliding_window": _Key("attention.sliding_window", None),
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "sliding_window": _Key("attention.sliding_window"),
        "intermediate_size": _Key("expert_feed_forward_length"),
        "num_local_experts": _Key("expert_count"),
        "num_experts_per_tok": _Key("expert_used_count"),
        "swiglu_limit": 7.0,
    },
}
# Architecture → with how many layers attention is scaled by the hidden size of a head.
_SCALED_BY_WIDTH: Final = {"gemma2": 46, "gemma3": 62}

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Endings, words, digits (%s), signs with the ends of lines after them, white space.
_BY_CLASS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The same, but a capital after a small letter begins a word, and words have their endings.
_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(regex: str) -> tuple[Json, ...]:
    return (
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
        {**_BYTE_LEVEL, "use_regex": False},
    )


class _Pre(NamedTuple):
    """How a byte-level tokenizer splits a text before its merges, and what goes with that.

    ``whole``: a part that is a token is taken without merges.
    """

    steps: tuple[Json, ...]
    normalizer: Json | None = None
    whole: bool = False
    add_bos: bool = False


_GPT2: Json = {**_BYTE_LEVEL, "use_regex": True}
_LLAMA3 = _Pre(_split(_BY_CLASS % r"\p{N}{1,3}"), whole=True, add_bos=True)
_PRE: Final = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Pre(_LLAMA3.steps)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen"), _Pre(_split(_BY_CLASS % r"\p{N}"), {"type": "NFC"})
    ),
    **dict.fromkeys(
        ("gpt-4o", "llama4"),
        _Pre(_split(_BY_CASE % (f"{_ENDINGS}?", f"{_ENDINGS}?", r"\p{N}{1,3}"))),
    ),
    **dict.fromkeys(("gpt-2", "phi-2"), _Pre((_GPT2,))),
    "tekken": _Pre(_split(_BY_CASE % ("", "", r"\p{N}")), whole=True, add_bos=True),
    "smollm": _Pre(({"type": "Digits", "individual_digits": True}, _GPT2)),
}


@dataclass(frozen=True, slots=True)
class _Source:
    header: GgufHeader
    path: str
    architecture: str

    def refuse(self, what: str) -> UnsupportedSourceError:
        return UnsupportedSourceError(
            f"no config.json and tokenizer can be made for {self.path}: {what}",
            path=self.path,
            hint="Add config=DIR, a folder with the model's config.json and tokenizer.",
        )

    def find(self, key: str, kind: type[_T]) -> _T | None:
        """Return a value, None if it is missing; a float as the shortest that is the same F32."""
        key = key if key.startswith("tokenizer.") else f"{self.architecture}.{key}"
        value: Any = self.header.values.get(key)
        found: Any = type(value)
        if value is None:
            return None
        if found is not kind or (found in (int, float) and not 0 <= value < _LIMIT):
            raise self.refuse(f"{key} is {quoted(value)}")
        return cast("_T", float(str(np.float32(value))) if found is float else value)

    def get(self, key: _Key) -> Any:
        if (value := self.find(key.name, key.kind) or key.default) is ...:
            raise self.refuse(f"{self.architecture}.{key.name} is missing")
        return value

    def factors(self, values: Sequence[float]) -> list[float]:
        if not all(0 < value < _LIMIT for value in values):
            raise self.refuse("its rotations have factors that are not positive numbers")
        return [float(str(np.float32(value))) for value in values]

    def items(self, key: str, kind: type[_T], count: int | None = None) -> list[_T]:
        values = self.header.values.get(f"tokenizer.ggml.{key}")
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise self.refuse(f"tokenizer.ggml.{key} is missing, or has values of another type")
        if count not in (None, len(values)):
            raise self.refuse(f"{count:,} tokens have {len(values):,} {key} in tokenizer.ggml")
        return values


def documents_of(header: GgufHeader, path: str, read: _ReadFloats) -> dict[str, bytes]:
    """Return the documents of a GGUF file by their names, sorted.

    ``path`` is for messages. Raises: UnsupportedSourceError for an architecture or a tokenizer that
    is not known, and for metadata that contradict each other.
    """
    source = _Source(header, path, str(header.values.get("general.architecture")))
    if source.architecture not in _CONFIGS:
        raise source.refuse(
            f"its architecture is {quoted(source.architecture)}, which is not known"
        )
    if source.architecture == "llama" and (source.find("expert_count", int) or 0) > 0:
        raise source.refuse("its architecture is 'llama', with experts")
    config = _config(source, read)
    vocabulary = _vocabulary(source, config["vocab_size"])
    ids = {f"{role}_token_id": vocabulary.ids.get(role) for role in ("bos", "eos", "pad")}
    made = {
        CONFIG_NAME: config | ids,
        "generation_config.json": ids | {"eos_token_id": vocabulary.ends},
        TOKENIZER: vocabulary.tokenizer,
        "tokenizer_config.json": vocabulary.config
        | {"model_max_length": config["max_position_embeddings"]},
    }
    return {
        name: json.dumps(
            value, ensure_ascii=False, allow_nan=False, indent=None if name == TOKENIZER else 2
        ).encode()
        for name, value in made.items()
    }


def _config(source: _Source, read: _ReadFloats) -> Json:
    tensors, arch = source.header.tensors, source.architecture
    made = {
        key: source.get(one) if isinstance(one, _Key) else one
        for key, one in {**_COMMON, **_CONFIGS[arch]}.items()
    }
    heads, layers = made["num_attention_heads"], made["num_hidden_layers"]
    embedding, width = tensors.get("token_embd.weight"), made["hidden_size"] // heads
    if not (embedding and embedding.dims) or layers > len(tensors):
        raise source.refuse("token_embd.weight or a layer is missing")
    head_dim = made["head_dim"] or width
    rotated = source.find("rope.dimension_count", int) or head_dim
    if not head_dim:
        raise source.refuse(f"{heads} heads, and a hidden_size of {made['hidden_size']}")
    if arch in _SCALED_BY_WIDTH:
        made["query_pre_attn_scalar"] = width if layers == _SCALED_BY_WIDTH[arch] else head_dim
    if arch == "gpt-oss":
        made["layer_types"] = (["sliding_attention", "full_attention"] * layers)[:layers]
    if arch == "phi3":
        made["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise source.refuse(f"only {rotated} of a head's {head_dim} dimensions are rotated")
    return made | {
        "num_key_value_heads": made["num_key_value_heads"] or heads,
        "head_dim": head_dim,
        "vocab_size": embedding.dims[0],
        "rope_scaling": _rope_scaling(source, read, made["rope_theta"], rotated),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": model_dtype(source.header).array_name,
    }


def _rope_scaling(source: _Source, read: _ReadFloats, theta: float, rotated: int) -> Json | None:
    tensors, arch = source.header.tensors, source.architecture
    if "rope_freqs.weight" in tensors and arch == "llama":
        return _llama3_scaling(source, source.factors(read("rope_freqs.weight")), theta, rotated)
    names = {f"{kind}_factor": f"rope_factors_{kind}.weight" for kind in ("short", "long")}
    if arch == "phi3" and tensors.keys() >= set(names.values()):
        factors = {key: source.factors(read(name)) for key, name in names.items()}
        return {"type": "longrope", "rope_type": "longrope", **factors}
    kind = source.find("rope.scaling.type", str) or "linear"
    factor = source.find("rope.scaling.factor", float) or source.find("rope.scale_linear", float)
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind not in ("linear", "yarn") or not factor:
        raise source.refuse(f"its positions are scaled as {quoted(kind)}")
    scaling: Json = {"type": kind, "rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaling
    length = source.get(_Key("rope.scaling.original_context_length"))
    fixed: Json = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    betas = {key: source.find(f"rope.scaling.yarn_{key}", float) for key in list(fixed)[:2]}
    given = {key: value for key, value in betas.items() if value is not None}
    fixed = fixed if arch == "gpt-oss" else {}
    return {**scaling, "original_max_position_embeddings": length, **fixed, **given}


def _llama3_scaling(
    source: _Source, factors: Sequence[float], theta: float, rotated: int
) -> Json | None:
    """Return the scaling of Llama 3.1 to 3.3, of which a file has only the factors that it makes.

    Source: conversion/llama.py `LlamaModel.generate_extra_tensors`.
    """
    factor, low, high, length = max(factors, default=1.0), 1.0, 4.0, 8192
    lengths = [2 * math.pi * theta ** (2 * n / rotated) for n in range(len(factors))]
    smooth = [min(max((length / one - low) / (high - low), 0.0), 1.0) for one in lengths]
    expected = [1 / ((1 - part) / factor + part) for part in smooth]
    if 2 * len(factors) != rotated or not np.allclose(factors, expected, rtol=1e-4, atol=0):
        raise source.refuse("rope_freqs.weight has other factors than Llama 3.1's")
    if factor == 1.0:
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


class _Vocabulary(NamedTuple):
    """The tokens of a file, their types, and the ids of those with a role: ``bos`` and so on."""

    source: _Source
    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]
    pre: _Pre | None

    def _marked(self) -> Iterator[tuple[str, int]]:
        return zip(self.tokens, self.types, strict=True)

    @property
    def ends(self) -> list[int]:
        """The ids of the tokens that end a text; gpt-oss's ``<|end|>`` only ends a message."""
        ends = _ENDS - {"<|end|>"} if "<|return|>" in self.tokens else _ENDS
        named = {self.ids[role] for role in ("eos", "eot", "eom") if role in self.ids}
        marked = enumerate(self._marked())
        return sorted(named | {n for n, (one, kind) in marked if kind == _CONTROL and one in ends})

    @property
    def added(self) -> tuple[str, ...]:
        """The roles of the tokens that are put before or after a text: ``bos``, ``eos``."""
        default = {"bos": self.pre is None or self.pre.add_bos, "eos": False}
        said = {one: self.source.find(f"tokenizer.ggml.add_{one}_token", bool) for one in default}
        wanted = {one: default[one] if adds is None else adds for one, adds in said.items()}
        return tuple(role for role, adds in wanted.items() if adds and role in self.ids)

    @property
    def config(self) -> Json:
        template = self.source.find("tokenizer.chat_template", str)
        named = [role for role in ("bos", "eos", "unk", "pad") if role in self.ids]
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{role}_token": self.tokens[self.ids[role]] for role in named},
            **{f"add_{role}_token": role in self.added for role in ("bos", "eos")},
            "clean_up_tokenization_spaces": False,
            **({"chat_template": template} if template is not None else {}),
        }

    @property
    def tokenizer(self) -> Json:
        # Tokens that only fill up the matrix are left out.
        used = [kind != _UNUSED or not one.startswith("[PAD") for one, kind in self._marked()]
        numbers = {token: n for n, token in enumerate(self.tokens) if used[n]}
        if len(numbers) != sum(used):
            raise self.source.refuse("two of its tokens are the same")
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(self._added_tokens()),
            "post_processor": self._template(),
            **(self._by_scores(numbers) if self.pre is None else self._by_bytes(numbers, self.pre)),
        }

    def _by_bytes(self, numbers: Mapping[str, int], pre: _Pre) -> Json:
        merges = self.source.items("merges", str)
        for merge in merges:
            left, _, right = merge[1:].partition(" ")  # a piece is never empty
            if any(
                one not in numbers for one in (merge[:1] + left, right, merge[:1] + left + right)
            ):
                raise self.source.refuse(f"the merge {quoted(merge)} is not of its tokens")
        return {
            "normalizer": pre.normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
            "decoder": _GPT2,
            "model": _bpe(numbers, merges, ignore_merges=pre.whole),
        }

    def _by_scores(self, numbers: Mapping[str, int]) -> Json:
        adds = self.source.find("tokenizer.ggml.add_space_prefix", bool) is not False
        begins = [{"type": "Prepend", "prepend": "▁"}] if adds else []
        strips = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*begins, spaces]},
            "pre_tokenizer": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strips],
            },
            "model": _bpe(
                numbers,
                self._merges(numbers),
                unk_token=self.tokens[self.ids["unk"]],
                fuse_unk=True,
                byte_fallback=_BYTE in self.types,
            ),
        }

    def _merges(self, numbers: Mapping[str, int]) -> list[str]:
        is_gemma = self.source.architecture.startswith("gemma")
        scores = self.source.items("scores", float, len(self.tokens))
        if not all(map(math.isfinite, scores)) or sum(map(len, numbers)) > _MAX_CHARACTERS:
            raise self.source.refuse("a score is not a number, or the tokens are too long")
        ranked = [
            (0.0 if is_gemma else -scores[number], number, token)
            for token, number in numbers.items()
            if self.types[number] in (_NORMAL, _USER) and " " not in token
        ]
        return [
            f"{token[:cut]} {token[cut:]}"
            for _, _, token in sorted(ranked)
            for cut in range(len(token) - 1, 0, -1)
            if token[:cut] in numbers and token[cut:] in numbers
        ]

    def _added_tokens(self) -> Iterator[Json]:
        strips = self.source.architecture == "phi3" and self.pre is None
        for number, (token, kind) in enumerate(self._marked()):
            if kind in (_UNKNOWN, _CONTROL) or (kind == _USER and token.strip("▁")):
                yield {
                    "id": number,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": strips and token not in ("<unk>", "<s>", "<|endoftext|>"),
                    "normalized": False,
                    "special": kind != _USER,
                }

    def _template(self) -> Json:
        tokens = {role: self.tokens[self.ids[role]] for role in self.added}

        def around(text: str, number: int) -> list[Json]:
            text_part = {"Sequence": {"id": text, "type_id": number}}
            parts = {
                role: {"SpecialToken": {"id": token, "type_id": number}}
                for role, token in tokens.items()
            }
            return [one for one in (parts.get("bos"), text_part, parts.get("eos")) if one]

        return {
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": around("A", 0) + around("B", 1),
            "special_tokens": {
                token: {"id": token, "ids": [self.ids[role]], "tokens": [token]}
                for role, token in tokens.items()
            },
        }


def _vocabulary(source: _Source, rows: int) -> _Vocabulary:
    tokens = source.items("tokens", str)
    types = source.items("token_type", int, len(tokens))
    if len(tokens) > rows:
        raise source.refuse(f"it has {len(tokens):,} tokens, and token_embd.weight {rows:,} rows")
    model, name = (source.find(f"tokenizer.ggml.{key}", str) for key in ("model", "pre"))
    pre = _PRE.get(name or "") if model == "gpt2" else None
    if pre is None and model != "llama":
        split = f" with texts split as {quoted(name)}" if model == "gpt2" else ""
        raise source.refuse(f"its tokenizer is {quoted(model)}{split}, which is not known")
    said = {
        role: source.find(f"tokenizer.ggml.{key}_token_id", int) for role, key in _ROLES.items()
    }
    ids = {} if pre is not None else {"unk": 0, "bos": 1, "eos": 2}
    ids |= {role: number for role, number in said.items() if number not in (None, _NO_ID)}
    if (most := max(ids.values(), default=0)) >= len(tokens):
        raise source.refuse(f"the token {most} has a role, and there are {len(tokens):,} tokens")
    if pre is None:  # converters write runs of spaces, which merges make of "▁", as spaces
        marked = zip(tokens, types, strict=True)
        tokens = [
            "▁" * len(one) if kind == _USER and not one.strip(" ") else one for one, kind in marked
        ]
    return _Vocabulary(source, tokens, types, ids, pre)


def _bpe(numbers: Mapping[str, int], merges: Sequence[str], **settings: Any) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **settings,
        "vocab": numbers,
        "merges": merges,
    }
