"""Where a model runs, by its config.json, its documents, its tensors and its draft."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from blobstore.formats.documents import REQUIRED_OLLAMA
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization, QuantType
from blobstore.model import on_mlx_lm as mlx_lm, on_ollama as ollama
from blobstore.model.facts import Layout, ModelFacts, Runs, TensorFacts, Verdict

INT4, INT8 = Quantization(QuantType.INT4, 32), Quantization(QuantType.INT8, 64)
NVFP4, MXFP8 = Quantization(QuantType.NVFP4, 16), Quantization(QuantType.MXFP8, 32)
EMBEDDING = TensorFacts("model.embed_tokens.weight", DType.BF16, (96, 64))
EXPERTS = "model.layers.0.mlp.experts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
DOCUMENTS = frozenset({"config.json", "tokenizer.json", "tokenizer_config.json"})


def _weight(name: str, quantization: Quantization | None = INT4, **changes: Any) -> TensorFacts:
    return TensorFacts(name, DType.BF16, (64, 64), quantization, **changes)


def _model(architecture: str, model_type: str, *tensors: TensorFacts, **config: Any) -> ModelFacts:
    head = (EMBEDDING, _weight("model.layers.0.self_attn.q_proj.weight"))
    return ModelFacts(
        {"architectures": [architecture], "model_type": model_type, **config},
        DOCUMENTS,
        (*head, *tensors),
    )


def _one_by_one(
    group: str = EXPERTS, quantization: Quantization | None = INT4, **changes: Any
) -> list[TensorFacts]:
    names = [
        f"{group}.{expert}.{projection}.weight" for expert in range(2) for projection in PROJECTIONS
    ]
    return [_weight(name, quantization, **changes) for name in names]


def _stacked(group: str = EXPERTS, *projections: str) -> list[TensorFacts]:
    return [_weight(f"{group}.{projection}.weight") for projection in projections or PROJECTIONS]


def _both(model: ModelFacts) -> tuple[Verdict, Verdict]:
    return mlx_lm.verdict(model), ollama.verdict(model)


def _no(verdict: Verdict) -> str:
    assert verdict.runs is Runs.NO
    return verdict.reason


def _yes(verdict: Verdict) -> str:
    assert verdict.runs is Runs.YES
    return verdict.reason


def _unsure(verdict: Verdict) -> str:
    assert verdict.runs is Runs.UNKNOWN
    return verdict.reason


def test_a_dense_model() -> None:
    ours, theirs = _both(_model("Qwen3ForCausalLM", "qwen3", _weight("lm_head.weight", INT8)))
    assert ours == Verdict("mlx-lm", "0.32.2", Runs.YES, "qwen3, int4, int8")
    assert theirs == Verdict("Ollama", "0.33.0-rc2", Runs.YES, "Qwen3ForCausalLM, int4, int8")


def test_an_unquantized_model() -> None:
    model = ModelFacts(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, DOCUMENTS, (EMBEDDING,)
    )
    assert [_yes(verdict) for verdict in _both(model)] == [
        "qwen3, unquantized",
        "Qwen3ForCausalLM, unquantized",
    ]


def test_only_the_first_architecture_counts_for_ollama() -> None:
    model = _model("New", "qwen3")
    several = replace(
        model, config={"architectures": ["New", "Qwen3ForCausalLM"], "model_type": "qwen3"}
    )
    assert _no(ollama.verdict(several)) == "its runner has no New"


@pytest.mark.parametrize(
    ("config", "ours", "theirs"),
    [
        (None, "config.json is missing", "config.json is missing"),
        ({}, "config.json has no model_type", "config.json names no architecture"),
        (
            {"architectures": [], "model_type": 3},
            "config.json has no model_type",
            "config.json names no architecture",
        ),
        (
            {"architectures": ["XForY"], "model_type": "x"},
            "it has no model type x",
            "its runner has no XForY",
        ),
        (
            {"text_config": {"model_type": "llama"}},
            "config.json has no model_type",
            "config.json names no architecture",
        ),
        # A module of mlx_lm/models, but none with a model.
        (
            {"architectures": ["Base"], "model_type": "base"},
            "it has no model type base",
            "its runner has no Base",
        ),
    ],
)
def test_no_architecture_that_is_known(
    config: dict[str, Any] | None, ours: str, theirs: str
) -> None:
    assert [_no(verdict) for verdict in _both(ModelFacts(config, DOCUMENTS, (EMBEDDING,)))] == [
        ours,
        theirs,
    ]


def test_gpt_oss_in_bfloat16_is_not_what_mlx_lm_reads() -> None:
    down, fused = _weight(f"{EXPERTS}.down_proj"), _weight(f"{EXPERTS}.gate_up_proj", None)
    biases = [
        TensorFacts(f"{EXPERTS}.{name}_proj_bias", DType.BF16, (4, 64))
        for name in ("gate_up", "down")
    ]
    ours, _ = _both(_model("GptOssForCausalLM", "gpt_oss", down, fused, *biases))
    assert _no(ours).endswith(f"only when they are quantized, and {EXPERTS}.gate_up_proj is not")
    ours, _ = _both(
        _model("GptOssForCausalLM", "gpt_oss", down, fused._replace(quantization=INT8), *biases)
    )
    assert _yes(ours) == "gpt_oss, int4, int8"
    ours, _ = _both(
        _model(
            "GptOssForCausalLM", "gpt_oss", down, fused._replace(quantization=INT8), hidden_size=32
        )
    )
    assert _no(ours).startswith(f"{EXPERTS}.gate_up_proj is quantized along its outputs")


def test_bitnet_needs_its_scales_and_olmo_a_package() -> None:
    ours, _ = _both(_model("BitNetForCausalLM", "bitnet"))
    assert "weight_scale" in _no(ours)
    scale = TensorFacts("model.layers.0.self_attn.q_proj.weight_scale", DType.BF16, (1,))
    ours, _ = _both(_model("BitNetForCausalLM", "bitnet", scale))
    assert _yes(ours) == "bitnet, int4"
    ours, _ = _both(_model("OlmoForCausalLM", "olmo"))
    assert _unsure(ours) == "olmo needs the package ai2-olmo"


def test_gpt_oss() -> None:
    ours, theirs = _both(_model("GptOssForCausalLM", "gpt_oss"))
    assert (_yes(ours), _no(theirs)) == ("gpt_oss, int4", "its runner has no GptOssForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "model_type", "reason"),
    [
        ("MistralForCausalLM", "mistral", "mistral as llama, int4"),
        ("BailingMoeV3ForCausalLM", "bailing_hybrid", "bailing_hybrid as bailing_moe_v3, int4"),
        ("BailingMoeV2_5ForCausalLM", "bailing_hybrid", "bailing_hybrid, int4"),
    ],
)
def test_types_that_mlx_lm_has_under_another_name(
    architecture: str, model_type: str, reason: str
) -> None:
    assert _yes(mlx_lm.verdict(_model(architecture, model_type))) == reason


def test_a_tokenizer_is_needed() -> None:
    model = _model("LlamaForCausalLM", "llama")
    slow = replace(model, documents=frozenset({"config.json", "tokenizer.model"}))
    assert _yes(mlx_lm.verdict(slow)) == "llama, int4"
    assert _no(ollama.verdict(slow)) == "there is no tokenizer.json"
    assert (
        _no(mlx_lm.verdict(replace(model, documents=frozenset({"config.json"}))))
        == "there is no tokenizer"
    )


def test_the_embedding_has_to_be_where_the_runner_looks() -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    model = ModelFacts(
        config, DOCUMENTS, (EMBEDDING._replace(name="model.language_model.embed_tokens.weight"),)
    )
    assert _no(ollama.verdict(model)) == (
        "its runner finds no token embedding: none is called "
        "language_model.model.embed_tokens.weight or model.embed_tokens.weight"
    )
    assert _yes(
        ollama.verdict(replace(model, config=config | {"architectures": ["Qwen3_5ForCausalLM"]}))
    )


def test_arrays_that_mlx_has_not() -> None:
    buffer = TensorFacts("model.inv_freq", DType.F64, (8,))
    model = _model("LlamaForCausalLM", "llama", buffer)
    ours, theirs = _both(model)
    assert _no(ours) == "MLX has no F64 arrays like model.inv_freq"
    assert _unsure(theirs) == "its runner drops the blob of model.inv_freq: MLX has no F64"


def test_images_are_for_some() -> None:
    gemma = _model("Gemma3ForConditionalGeneration", "gemma3", vision_config={"hidden_size": 4})
    assert [_yes(one) for one in _both(gemma)] == [
        "gemma3, int4, text only",
        "Gemma3ForConditionalGeneration, int4, text only",
    ]
    qwen = _model("Qwen3_5ForConditionalGeneration", "qwen3_5", vision_config={"hidden_size": 4})
    assert [_yes(one) for one in _both(qwen)] == [
        "qwen3_5, int4, text only",
        "Qwen3_5ForConditionalGeneration, int4",
    ]


COHERE = ("Cohere2MoeForCausalLM", "cohere2_moe")


def test_cohere2_moe_needs_its_experts_stacked() -> None:
    assert _no(ollama.verdict(_model(*COHERE, *_one_by_one()))) == (
        'its runner reads experts stacked; here they are one by one (import with experts="stacked")'
    )
    assert (
        _yes(ollama.verdict(_model(*COHERE, *_stacked())))
        == "Cohere2MoeForCausalLM, int4, from version 0.31.2"
    )
    older = _stacked("model.layers.0.mlp.switch_mlp")
    assert (
        _yes(ollama.verdict(_model(*COHERE, *older)))
        == "Cohere2MoeForCausalLM, int4, from version 0.30.10"
    )


@pytest.mark.parametrize(
    ("architecture", "tensors", "reason"),
    [
        ("Qwen3NextForCausalLM", _one_by_one(), None),
        ("Qwen3NextForCausalLM", _stacked(), None),
        ("Qwen3_5MoeForCausalLM", _stacked(EXPERTS, "gate_up_proj", "down_proj"), None),
        ("Gemma4ForCausalLM", _one_by_one("model.layers.0.moe.experts"), None),
        (
            "Gemma4ForCausalLM",
            _stacked("model.layers.0.experts", "gate_up_proj", "down_proj"),
            None,
        ),
        (
            "Gemma4ForCausalLM",
            _stacked("model.layers.0.moe.experts"),
            "its runner reads experts one by one; here they are stacked",
        ),
        ("Gemma4ForCausalLM", _one_by_one(), "its runner reads no experts called mlp.experts"),
        ("LagunaForCausalLM", _one_by_one(), None),
        (
            "LagunaForCausalLM",
            _stacked(EXPERTS, "gate_up_proj", "down_proj"),
            (
                "its runner reads experts one by one or stacked; here they are stacked with gate "
                "and up in one tensor"
            ),
        ),
        ("LlamaForCausalLM", _one_by_one(), "its runner reads no experts called mlp.experts"),
        # Shared experts are linear layers like any other.
        ("LlamaForCausalLM", [_weight("model.layers.0.mlp.shared_experts.up_proj.weight")], None),
    ],
)
def test_where_experts_are_read(
    architecture: str, tensors: list[TensorFacts], reason: str | None
) -> None:
    verdict = ollama.verdict(_model(architecture, "x", *tensors))
    assert (_no(verdict) if reason else _yes(verdict).split(",")[0]) == (reason or architecture)


def test_codes_of_experts_that_differ_in_type_can_not_be_stacked() -> None:
    first, *others = _one_by_one()
    model = _model(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe", first._replace(quantization=INT8), *others
    )
    ours, theirs = _both(model)
    assert _yes(ours) == "qwen3_5_moe, int4, int8"
    assert (
        _no(theirs) == f"it stacks experts, and those of {EXPERTS} have several types in gate_proj"
    )
    per_projection = [
        _weight(one.name, INT8 if "down" in one.name else INT4) for one in _one_by_one()
    ]
    assert _yes(ollama.verdict(_model("Qwen3_5MoeForCausalLM", "qwen3_5_moe", *per_projection)))


def test_global_scales() -> None:
    linear = _weight("model.layers.0.mlp.up_proj.weight", NVFP4, double_scaled=True)
    ours, theirs = _both(_model("LlamaForCausalLM", "llama", linear))
    assert (
        _yes(ours)
        == "llama, int4, nvfp4, not from an exported folder, because of its global scales"
    )
    assert _yes(theirs) == "LlamaForCausalLM, int4, nvfp4"


def test_a_global_scale_of_the_embedding() -> None:
    embedding = EMBEDDING._replace(quantization=NVFP4, double_scaled=True)
    model = ModelFacts(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, DOCUMENTS, (embedding,)
    )
    ours, theirs = _both(model)
    assert _yes(ours) == ("llama, nvfp4, not from an exported folder, because of its global scales")
    assert _yes(theirs) == "LlamaForCausalLM, nvfp4"


def test_global_scales_of_experts() -> None:
    experts = _one_by_one(EXPERTS, NVFP4, double_scaled=True)
    assert (
        _no(ollama.verdict(_model("Qwen3_5MoeForCausalLM", "x", *experts)))
        == "its runner ignores the global scales of experts"
    )
    assert _yes(ollama.verdict(_model("LagunaForCausalLM", "x", *experts)))


def test_drafts() -> None:
    gemma = replace(_model("Gemma4ForCausalLM", "gemma4"), draft="Gemma4AssistantForCausalLM")
    assert [_yes(one) for one in _both(gemma)] == [
        "gemma4, int4, without its draft",
        "Gemma4ForCausalLM, int4, from version 0.23.1",
    ]
    qwen = replace(_model("Qwen3ForCausalLM", "qwen3"), draft="DFlashDraftModel")
    assert (
        _no(ollama.verdict(qwen)) == "its runner has no draft DFlashDraftModel for Qwen3ForCausalLM"
    )


def test_tensors_of_a_draft_are_not_the_models() -> None:
    draft = [_weight(f"draft.{EXPERTS}.0.up_proj.weight"), TensorFacts("draft.x", DType.F64, (8,))]
    assert (
        _yes(ollama.verdict(_model("LlamaForCausalLM", "llama", *draft)))
        == "LlamaForCausalLM, int4"
    )


@pytest.mark.parametrize(
    ("quantizations", "runs"),
    [
        ((NVFP4, NVFP4), Runs.YES),
        ((NVFP4, MXFP8), Runs.UNKNOWN),
        ((None, NVFP4), Runs.UNKNOWN),
        ((None, None), Runs.YES),
    ],
)
def test_glm_takes_one_quantization_for_all_experts(
    quantizations: tuple[Quantization | None, ...], runs: Runs
) -> None:
    experts, head = quantizations
    tensors = (EMBEDDING, *_one_by_one(EXPERTS, experts), _weight("lm_head.weight", head))
    model = ModelFacts(
        {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "rope_theta": 1.0,
            "first_k_dense_replace": 1,
        },
        DOCUMENTS,
        tensors,
    )
    assert ollama.verdict(model).runs is runs


@pytest.mark.parametrize(
    ("architecture", "config", "unread"),
    [
        (
            "LlamaForCausalLM",
            {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3"}},
            "rope_scaling",
        ),
        ("LlamaForCausalLM", {"rope_theta": 500_000.0, "rope_scaling": None}, None),
        (
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
            "rope_parameters",
        ),
        (
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
            None,
        ),
        (
            "LlamaForCausalLM",
            {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            None,
        ),
        (
            "Gemma3ForCausalLM",
            {"text_config": {"rope_scaling": {"type": "linear", "factor": 8.0}}},
            "rope_scaling",
        ),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
            "rope_parameters",
        ),
        (
            "Gemma3ForCausalLM",
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                }
            },
            None,
        ),
        ("Qwen3_5ForCausalLM", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5.0}}, None),
    ],
)
def test_settings_of_the_rotation_that_a_runner_does_not_read(
    architecture: str, config: dict[str, Any], unread: str | None
) -> None:
    verdict = ollama.verdict(_model(architecture, "x", **config))
    if unread is None:
        assert _yes(verdict)
    else:
        assert (
            _unsure(verdict)
            == f"its runner does not read {unread} of config.json, so answers may be wrong"
        )


def test_a_key_of_the_config_that_the_runner_needs() -> None:
    embedding = EMBEDDING._replace(name="backbone.embeddings.weight")
    model = ModelFacts(
        {"architectures": ["NemotronHForCausalLM"], "llm_config": {"hidden_size": 4}},
        DOCUMENTS,
        (embedding,),
    )
    assert _no(ollama.verdict(model)) == "its runner needs hybrid_override_pattern of config.json"


def test_the_table_of_ollama_is_whole() -> None:
    assert ollama.FIRST_VERSION == REQUIRED_OLLAMA
    assert len(ollama.BY_ARCHITECTURE) == sum(
        len(family.architectures) for family in ollama.FAMILIES
    )
    for family in ollama.FAMILIES:
        assert family.embeddings
        assert all(isinstance(layout, Layout) for _, layout in family.experts)


# What Ollama's runner needs of a tokenizer and of config.json


SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SENTENCES = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}}]}


def _tokenized(
    model: ModelFacts | None = None, /, *splits: str, kind: str | None = "BPE", **document: Any
) -> Verdict:
    """Return Ollama's verdict on a model with a tokenizer that has these Split steps."""
    steps = [{"type": "Split", "pattern": {"Regex": regex}} for regex in splits]
    steps.append({"type": "ByteLevel"})
    written = {
        "added_tokens": [{"id": 0, "content": "<|start|>"}],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": kind, "vocab": {"a": 0}} if kind else {"vocab": {"a": 0}},
    }
    raw = json.dumps(written | document).encode()
    return ollama.verdict(replace(model or _model("Qwen3ForCausalLM", "qwen3"), read=lambda _: raw))


def test_a_tokenizer_that_is_read() -> None:
    assert _yes(_tokenized(None, SPLIT))
    assert _yes(_tokenized(None, decoder=SENTENCES))
    assert _yes(_tokenized(None, "(?<=a)b", decoder=SENTENCES))  # the runner does not use it


@pytest.mark.parametrize("kind", ["Unigram", "WordPiece", None])
def test_a_tokenizer_of_another_type(kind: str | None) -> None:
    assert "of type BPE" in _no(_tokenized(None, SPLIT, kind=kind))


@pytest.mark.parametrize("regex", [r"(?<=a)b", r"a(?=b)", r"(a)\1", r"(?>a)b", r"\p{L}++", r"a*+"])
def test_a_split_that_re2_does_not_have(regex: str) -> None:
    assert "RE2" in _no(_tokenized(None, regex))


@pytest.mark.parametrize("regex", [r"[a+]+b", r"a+?", r"\++", r"\(?=a", r"\p{L}+", r"[(?=]"])
def test_a_split_that_re2_has(regex: str) -> None:
    assert _yes(_tokenized(None, regex))


def test_a_tokenizer_without_a_split() -> None:
    assert "white space" in _unsure(_tokenized(None))


def test_a_tokenizer_whose_model_comes_first() -> None:
    document = {"model": {"vocab": {"a": 0}, "type": "Unigram"}, "added_tokens": []}
    raw = json.dumps(document).encode()
    model = replace(_model("Qwen3ForCausalLM", "qwen3"), read=lambda _: raw)
    assert "Unigram" in _no(ollama.verdict(model))


def test_attention_of_gemma_3_that_is_scaled_otherwise() -> None:
    facts = {"query_pre_attn_scalar": 168, "head_dim": 128}
    name = "Gemma3ForCausalLM"
    assert "query_pre_attn_scalar" in _unsure(_tokenized(_model(name, "gemma3", **facts), SPLIT))
    assert "query_pre_attn_scalar" in _unsure(_tokenized(_model(name, "gemma3", **facts)))
    assert _yes(_tokenized(_model(name, "gemma3", query_pre_attn_scalar=256), SPLIT))


@pytest.mark.parametrize(
    ("architecture", "key", "others"),
    [
        ("Glm4MoeLiteForCausalLM", "first_k_dense_replace", {}),
        ("NemotronHForCausalLM", "num_hidden_layers", {"hybrid_override_pattern": "M*"}),
        ("MuseGlimmerForConditionalGeneration", "no_rope_layers", {}),
    ],
)
def test_keys_of_config_json_that_the_runner_needs(
    architecture: str, key: str, others: dict[str, Any]
) -> None:
    model = _model(architecture, "x", **others)
    model = replace(model, tensors=(*model.tensors, _weight("backbone.embeddings.weight")))
    assert key in _no(_tokenized(model, SPLIT))
    complete = replace(model, config={**(model.config or {}), key: [1]})
    assert _yes(_tokenized(complete, SPLIT))


def test_a_token_that_the_runner_needs() -> None:
    model = _model("MuseGlimmerForConditionalGeneration", "x", no_rope_layers=[1])
    assert "<|start|>" in _no(_tokenized(model, SPLIT, added_tokens=[]))


def test_blobs_that_do_not_say_their_types() -> None:
    model = replace(_model("Qwen3ForCausalLM", "qwen3"), is_described=False)
    assert "do not say their types" in _no(ollama.verdict(model))
