"""Where a model runs, by its config.json, its documents, its tensors and its draft."""

import json
from dataclasses import replace
from typing import Any

from blobstore.formats.dtypes import DType, Quantization, QuantType
from blobstore.model import on_mlx_lm as mlx_lm, on_ollama as ollama
from blobstore.model.facts import ModelFacts, Runs, TensorFacts, Verdict

INT4, INT8 = Quantization(QuantType.INT4, 32), Quantization(QuantType.INT8, 64)
NVFP4 = Quantization(QuantType.NVFP4, 16)
EMBEDDING = TensorFacts("model.embed_tokens.weight", DType.BF16, (96, 64))
EXPERTS = "model.layers.0.mlp.experts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
DOCUMENTS = frozenset({"config.json", "tokenizer.json", "tokenizer_config.json"})
YES, NO, UNKNOWN = Runs.YES, Runs.NO, Runs.UNKNOWN


def weight(name: str, quantization: Quantization | None = INT4, **changes: Any) -> TensorFacts:
    return TensorFacts(name, DType.BF16, (64, 64), quantization, **changes)


def model(architecture: str, model_type: str, *tensors: TensorFacts, **config: Any) -> ModelFacts:
    """Return a model with an embedding, an int4 projection and these tensors."""
    names = {"architectures": [architecture], "model_type": model_type}
    head = (EMBEDDING, weight("model.layers.0.self_attn.q_proj.weight"))
    return ModelFacts(names | config, DOCUMENTS, (*head, *tensors))


def numbered(quantization: Quantization | None = INT4, **changes: Any) -> list[TensorFacts]:
    names = [f"{EXPERTS}.{expert}.{part}.weight" for expert in range(2) for part in PROJECTIONS]
    return [weight(name, quantization, **changes) for name in names]


def stacked(*projections: str) -> list[TensorFacts]:
    return [weight(f"{EXPERTS}.{projection}.weight") for projection in projections or PROJECTIONS]


def with_documents(facts: ModelFacts, *names: str) -> ModelFacts:
    return replace(facts, documents=frozenset(names))


def test_a_dense_model() -> None:
    facts = model("Qwen3ForCausalLM", "qwen3", weight("lm_head.weight", INT8))
    assert mlx_lm.verdict(facts) == Verdict("mlx-lm", "0.32.2", YES, "qwen3, int4, int8")
    words = "Qwen3ForCausalLM, int4, int8"
    assert ollama.verdict(facts) == Verdict("Ollama", "0.33.0-rc2", YES, words)


LLAMA = model("LlamaForCausalLM", "llama")
F64 = TensorFacts("model.inv_freq", DType.F64, (8,))
DOWN, FUSED = weight(f"{EXPERTS}.down_proj"), weight(f"{EXPERTS}.gate_up_proj", INT8)
GPT_OSS = ("GptOssForCausalLM", "gpt_oss")
SCALED = weight("model.layers.0.mlp.up_proj.weight", NVFP4, double_scaled=True)
GEMMA = model("Gemma3ForConditionalGeneration", "gemma3", vision_config={"hidden_size": 4})
DRAFTED = replace(model("Gemma4ForCausalLM", "gemma4"), draft="Gemma4AssistantForCausalLM")
IN_MLX_LM: list[tuple[ModelFacts, Runs, str]] = [
    (ModelFacts(None, DOCUMENTS, (EMBEDDING,)), NO, "config.json is missing"),
    (ModelFacts({"model_type": 3}, DOCUMENTS, (EMBEDDING,)), NO, "model_type"),
    (model("BailingMoeV3ForCausalLM", "bailing_hybrid"), YES, "as bailing_moe_v3, int4"),
    (with_documents(LLAMA, "config.json"), NO, "the tokenizer is missing"),
    (replace(LLAMA, tensors=(F64,)), NO, "MLX has no F64 arrays like model.inv_freq"),
    (model("LlamaForCausalLM", "llama", SCALED), YES, "global scales"),
    (GEMMA, YES, "gemma3, int4, text only"),
    (model(*GPT_OSS, DOWN, FUSED), YES, "gpt_oss, int4, int8"),
    (model(*GPT_OSS, DOWN, FUSED._replace(quantization=None)), NO, "gate_up_proj is not"),
    (model("BitNetForCausalLM", "bitnet"), NO, "weight_scale"),
    (model("OlmoForCausalLM", "olmo"), UNKNOWN, "olmo needs the package ai2-olmo"),
]


def test_in_mlx_lm() -> None:
    for facts, runs, reason in IN_MLX_LM:
        found = mlx_lm.verdict(facts)
        assert (found.runs, reason in found.reason) == (runs, True), found


GEMMA3 = ("Gemma3ForCausalLM", "gemma3")
SLIDING = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
UNREAD = "its runner does not read rope_scaling of"
COHERE = ("Cohere2MoeForCausalLM", "cohere2_moe")
QWEN35 = ("Qwen3_5MoeForCausalLM", "qwen3_5_moe")
NESTED = EMBEDDING._replace(name="model.language_model.embed_tokens.weight")
FUSED_EXPERTS = stacked("gate_up_proj", "down_proj")
FIRST_IN_INT8 = [numbered()[0]._replace(quantization=INT8), *numbered()[1:]]
SCALED_EXPERTS = numbered(NVFP4, double_scaled=True)
IN_OLLAMA: list[tuple[ModelFacts, Runs, str]] = [
    (ModelFacts(None, DOCUMENTS, (EMBEDDING,)), NO, "config.json is missing"),
    (with_documents(LLAMA, "config.json", "tokenizer.model"), NO, "tokenizer.json is missing"),
    (replace(LLAMA, is_described=False), NO, "do not say their types"),
    (replace(LLAMA, tensors=(NESTED,)), NO, "no token embedding"),
    (model("LlamaForCausalLM", "llama", F64), UNKNOWN, "drops the blob of model.inv_freq"),
    (model(*COHERE, *numbered()), NO, 'import with experts="stacked"'),
    (model(*COHERE, *stacked()), YES, "int4, from version 0.31.2"),
    (model(*QWEN35, *numbered()), YES, "Qwen3_5MoeForCausalLM"),
    (model("LagunaForCausalLM", "x", *FUSED_EXPERTS), NO, "with gate and up in one tensor"),
    (model("LlamaForCausalLM", "x", *numbered()), NO, "reads no experts called mlp.experts"),
    (model(*QWEN35, *FIRST_IN_INT8), NO, "several types in gate_proj"),
    (model(*QWEN35, *SCALED_EXPERTS), NO, "ignores the global scales of experts"),
    (DRAFTED, YES, "Gemma4ForCausalLM, int4, from version 0.23.1"),
    (replace(LLAMA, draft="DFlashDraftModel"), NO, "no draft DFlashDraftModel"),
    (model(*GEMMA3, query_pre_attn_scalar=168, head_dim=128), UNKNOWN, "query_pre_attn_scalar"),
    (model("LlamaForCausalLM", "x", rope_scaling={"rope_type": "llama3"}), UNKNOWN, UNREAD),
    (model(*GEMMA3, text_config={"rope_scaling": {"type": "linear"}}), UNKNOWN, UNREAD),
    (model(*GEMMA3, rope_parameters=SLIDING), YES, "Gemma3ForCausalLM"),
]


def test_in_ollama() -> None:
    for facts, runs, reason in IN_OLLAMA:
        found = ollama.verdict(facts)
        assert (found.runs, reason in found.reason) == (runs, True), found


SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SENTENCES = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}}]}


def tokenized(facts: ModelFacts, *splits: str, kind: str = "BPE", **document: Any) -> Verdict:
    steps = [{"type": "Split", "pattern": {"Regex": regex}} for regex in splits]
    written = {
        "model": {"vocab": {"a": 0}, "type": kind},
        "added_tokens": [{"id": 0, "content": "<|start|>"}],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, {"type": "ByteLevel"}]},
        "decoder": {"type": "ByteLevel"},
    }
    raw = json.dumps(written | document).encode()
    return ollama.verdict(replace(facts, read=lambda _: raw))


def test_ollama_reads_byte_pair_tokenizers_that_split() -> None:
    assert tokenized(LLAMA, SPLIT).runs is YES
    assert tokenized(LLAMA, decoder=SENTENCES).runs is YES
    assert "white space" in tokenized(LLAMA).reason
    for kind in ("Unigram", "WordPiece"):
        assert f"type BPE, and this one is {kind}" in tokenized(LLAMA, SPLIT, kind=kind).reason
    none = tokenized(LLAMA, model={"vocab": {}})
    assert (none.runs, "type BPE" in none.reason) == (NO, True)


def test_ollama_splits_by_what_re2_has() -> None:
    for regex in (r"(?<=a)b", r"a(?=b)", r"(a)\1", r"(?>a)b", r"\p{L}++"):
        assert "RE2" in tokenized(LLAMA, regex).reason, regex
        assert tokenized(LLAMA, regex, decoder=SENTENCES).runs is YES  # the runner does not use it
    for regex in (r"[a+]+b", r"a+?", r"\++", r"\(?=a", r"[(?=]"):
        assert tokenized(LLAMA, regex).runs is YES, regex
