"""config.json and tokenizers made from the metadata of GGUF files.

``fixtures/gguf/make.py`` let llama.cpp convert tiny models, and wrote down their config.json and
what their own tokenizers make of texts.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
from support import FIXTURES
from tokenizers import Tokenizer

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.dtypes import DType
from blobstore.formats.gguf import GGUF_TYPES, GgufHeader, GgufTensor
from blobstore.source.gguf_documents import documents_of

MODELS = json.loads((FIXTURES / "gguf" / "models.json").read_bytes())
TOKENIZERS = json.loads((FIXTURES / "gguf" / "tokenizers.json").read_bytes())
TYPES = {kind.name: kind for kind in GGUF_TYPES}
Metadata = dict[str, Any]


def documents(
    name: str,
    changes: Mapping[str, Any] | None = None,
    without: str = "",
    factors: list[float] | None = None,
) -> dict[str, bytes]:
    """Return the documents of a model whose metadata have ``changes``; None leaves a key out."""
    model = MODELS[name]
    metadata = model["metadata"] | TOKENIZERS[model["tokenizer"]]["metadata"] | (changes or {})
    tensors = {
        tensor: GgufTensor(DType.U8, (), 0, 0, TYPES[kind], tuple(shape))
        for tensor, (kind, shape) in model["tensors"].items()
        if tensor != without
    }
    told = {key: value for key, value in metadata.items() if value is not None}
    floats = model["floats"] if factors is None else dict.fromkeys(model["floats"], factors)
    header = GgufHeader(tensors=tensors, metadata={}, data_start=0, values=told)
    return documents_of(header, f"{name}.gguf", floats.__getitem__)


def read_by_mlx(config: Metadata) -> tuple[Metadata, Metadata]:
    """Return what mlx-lm's model reads and how it scales positions, in newer names too."""
    model = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    nested = config.get("rope_parameters", {})
    rope = dict(nested.get("full_attention", nested) or config["rope_scaling"] or {})
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    scaling = {key: value for key, value in rope.items() if "type" not in key}
    kind = rope.get("rope_type", "default")
    settings = {"num_experts": config.get("num_local_experts")} | config | {"rope_theta": theta}
    settings |= {"rope_scaling": None if kind == "default" else rope | {"type": kind}}
    if "sliding_attention" in nested:
        settings["rope_local_base_freq"] = nested["sliding_attention"]["rope_theta"]
    read = asdict(model.ModelArgs.from_dict(settings))
    return {key: value for key, value in read.items() if "rope_" not in key or "base" in key} | {
        "rope": (kind, theta)
    }, scaling


@pytest.mark.parametrize("name", MODELS)
def test_mlx_reads_the_same_model(name: str) -> None:
    original, made = MODELS[name]["config"], json.loads(documents(name)["config.json"])
    if name == "mistral":  # a file does not say which of the two it is, and they compute the same
        original = original | {"model_type": "llama"}
    expected, scaling = read_by_mlx({"rope_scaling": None} | original)
    read, made_scaling = read_by_mlx(made)
    head_dim = original.get("head_dim") or 32 // 4
    assert read == expected | ({"head_dim": head_dim} if "head_dim" in read else {})
    assert made["head_dim"] == head_dim
    assert {key: scaling[key] for key in made_scaling} == made_scaling
    kept_apart = {"original_max_position_embeddings", "partial_rotary_factor"}
    assert scaling.keys() - made_scaling.keys() <= (kept_apart if name == "phi3" else set())
    assert made["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_have_the_ids_of_the_models_own_tokenizer(name: str) -> None:
    made = Tokenizer.from_str(documents(name)["tokenizer.json"].decode())
    for text, ids in TOKENIZERS[name]["texts"]:
        assert made.encode(text, add_special_tokens=False).ids == ids, text


ENDS = {
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
    "qwen3": [None, "<|endoftext|>", "<|im_end|>"],
    "gemma3": ["<bos>", "<eos>", "<end_of_turn>"],
    "phi3": ["<s>", "</s>", "<|endoftext|>", "<|end|>"],
    "gpt-oss": [None, "<|endoftext|>", "<|return|>", "<|call|>"],
}


@pytest.mark.parametrize(("name", "expected"), ENDS.items())
def test_texts_begin_and_end_as_in_llama_cpp(name: str, expected: list[str | None]) -> None:
    made = documents(name)
    tokenizer = Tokenizer.from_str(made["tokenizer.json"].decode())
    ends = json.loads(made["generation_config.json"])["eos_token_id"]
    first = tokenizer.encode("")
    begins = first.tokens[0] if first.tokens else None
    assert [begins, *map(tokenizer.id_to_token, ends)] == expected


def test_a_template_and_no_padding_are_kept() -> None:
    """An id of -1 is none."""
    none = {"tokenizer.ggml.padding_token_id": 2**32 - 1}
    made = documents("qwen3", {"tokenizer.chat_template": "{{ messages }}"} | none)
    assert json.loads(made["tokenizer_config.json"])["chat_template"] == "{{ messages }}"
    assert json.loads(made["config.json"])["pad_token_id"] is None


def test_without_an_output_matrix_embeddings_are_tied() -> None:
    for without, is_tied in (("", False), ("output.weight", True)):
        config = json.loads(documents("qwen3", without=without)["config.json"])
        assert config["tie_word_embeddings"] is is_tied


TOKENS = TOKENIZERS["qwen2"]["metadata"]["tokenizer.ggml.tokens"]
SCORES = TOKENIZERS["mistral"]["metadata"]["tokenizer.ggml.scores"]
MORE = {"tokenizer.ggml.tokens": [*TOKENS, "more"]}
MORE |= {"tokenizer.ggml.token_type": [1] * (len(TOKENS) + 1)}
WIDE = {"llama.rope.dimension_count": 10**9, "llama.attention.key_length": 10**9}
LONG = {"qwen3.rope.scaling.type": "longrope", "qwen3.rope.scaling.factor": 2.0}
REFUSED: dict[str, tuple[str, Metadata]] = {
    "the architecture is unknown": ("qwen3", {"general.architecture": "rwkv7"}),
    "Mixtral's experts": ("llama3", {"llama.expert_count": 8}),
    "the tokenizer is unknown": ("qwen3", {"tokenizer.ggml.model": "t5"}),
    "texts are split in an unknown way": ("qwen3", {"tokenizer.ggml.pre": "default"}),
    "no way to split texts": ("qwen3", {"tokenizer.ggml.pre": None}),
    "no tokens": ("qwen3", {"tokenizer.ggml.tokens": None}),
    "tokens that are numbers": ("qwen3", {"tokenizer.ggml.tokens": [1] * len(TOKENS)}),
    "a token twice": ("qwen3", {"tokenizer.ggml.tokens": [*TOKENS[:-1], TOKENS[0]]}),
    "a type too few": ("qwen3", {"tokenizer.ggml.token_type": [1] * (len(TOKENS) - 1)}),
    "more tokens than rows": ("qwen3", MORE),
    "a merge of other tokens": ("qwen3", {"tokenizer.ggml.merges": ["zzz yyy"]}),
    "a merge of one piece": ("qwen3", {"tokenizer.ggml.merges": [""]}),
    "no scores": ("mistral", {"tokenizer.ggml.scores": None}),
    "a score too few": ("mistral", {"tokenizer.ggml.scores": SCORES[1:]}),
    "a score of NaN": ("mistral", {"tokenizer.ggml.scores": [*SCORES[1:], float("nan")]}),
    "the end is no token": ("qwen3", {"tokenizer.ggml.eos_token_id": len(TOKENS)}),
    "no layers": ("qwen3", {"qwen3.block_count": None}),
    "a billion layers": ("gpt-oss", {"gpt-oss.block_count": 10**9}),
    "a billion dimensions of a head": ("llama3", WIDE),
    "more heads than values": ("phi3", {"phi3.attention.head_count": 33}),
    "no heads": ("qwen3", {"qwen3.attention.head_count": 0}),
    "heads that are a text": ("qwen3", {"qwen3.attention.head_count": "4"}),
    "heads of each layer": ("qwen3", {"qwen3.attention.head_count_kv": [1, 2]}),
    "an infinite base": ("qwen3", {"qwen3.rope.freq_base": float("inf")}),
    "half of a head is rotated": ("qwen3", {"qwen3.rope.dimension_count": 16}),
    "positions are scaled in an unknown way": ("qwen3", LONG),
    "other factors than Llama's": ("llama3", {"llama.rope.freq_base": 10_000.0}),
    "factors of another head": ("llama3", {"llama.rope.dimension_count": 16}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_itself_is_refused(case: str) -> None:
    name, changes = REFUSED[case]
    with pytest.raises(UnsupportedSourceError, match=r"\.gguf: ") as caught:
        documents(name, changes)
    assert "config=DIR" in str(caught.value.hint)
    assert caught.value.path == f"{name}.gguf"


def test_factors_that_are_not_positive_are_refused() -> None:
    for name in ("llama3", "phi3"):
        for value in (float("nan"), float("inf"), 0.0, -1.0):
            with pytest.raises(UnsupportedSourceError, match="not positive"):
                documents(name, factors=[value] * 4)


def test_a_file_without_embeddings_is_refused() -> None:
    with pytest.raises(UnsupportedSourceError, match="token_embd"):
        documents("qwen3", without="token_embd.weight")
