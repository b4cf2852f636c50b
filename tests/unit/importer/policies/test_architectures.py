"""The policies by architecture beyond the records: names, config.json, layers, shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import QUANT_TYPES
from support.policies import (
    COHERE2,
    GEMMA4,
    GLIMMER,
    LAGUNA,
    NEMOTRON,
    QWEN,
    SHAPE,
    policy_of,
    promoted_layers,
    type_of,
)

from blobstore.errors import DocumentError
from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.quant import QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.policy import policy_for

PROFILES = ("default", "ollama")
TEXT = "model.language_model"
EIGHT_BIT = {"int4": "int8", "int8": "int8", "nvfp4": "mxfp8", "mxfp4": "mxfp8", "mxfp8": "mxfp8"}
FOUR_BIT = ("int4", "nvfp4", "mxfp4")
FP4 = ("nvfp4", "mxfp4")


every_type = pytest.mark.parametrize("asked", QUANT_TYPES)
every_profile = pytest.mark.parametrize("profile", PROFILES)


SPECIAL = (
    *(
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3NextForCausalLM",
        "Qwen3NextMoeForCausalLM",
    ),
    *(
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "Gemma4AssistantForCausalLM",
        "gemma4_unified_text",
    ),
    *("NemotronHForCausalLM", "NemotronH_Nano_Omni_Reasoning_V3", GLIMMER, COHERE2, LAGUNA),
)
GENERAL = (
    "LlamaForCausalLM",
    "Qwen3MoeForCausalLM",
    "Cohere2ForCausalLM",
    "Gemma3ForCausalLM",
    "gemma4",
    "cohere2_moe",
    "",
)


@every_profile
@pytest.mark.parametrize("architecture", SPECIAL)
def test_architectures_of_ollamas_registry_have_policies_of_their_own(
    architecture: str, profile: str
) -> None:
    assert policy_of(architecture, "int4", profile).rules


@every_profile
@pytest.mark.parametrize("architecture", GENERAL)
def test_other_architectures_have_the_general_policy_however_they_are_called(
    architecture: str, profile: str
) -> None:
    assert not policy_of(architecture, "int4", profile).rules


def test_model_without_a_config_has_the_general_policy() -> None:
    assert not policy_for(None, QuantType.INT4, ImportOptions.parse(quant="int4")).rules


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": [], "model_type": "gemma4_unified"},
        {
            "architectures": [""],
            "model_type": "",
            "text_config": {"model_type": "gemma4_unified_text"},
        },
    ],
)
def test_architecture_is_the_model_type_where_there_is_no_other_name(
    config: dict[str, Any],
) -> None:
    source = SourceConfig.parse(json.dumps(config).encode())
    assert policy_for(source, QuantType.INT4, ImportOptions.parse(quant="int4")).rules


@every_type
@every_profile
@pytest.mark.parametrize("part", ["in_proj_a", "in_proj_b", "in_proj_ba"])
def test_qwen_keeps_low_rank_projections_and_nothing_else(
    part: str, asked: str, profile: str
) -> None:
    policy = policy_of(QWEN, asked, profile)
    assert not policy.wants(f"{TEXT}.layers.0.linear_attn.{part}.weight", SHAPE)
    assert type_of(policy, f"{TEXT}.layers.0.linear_attn.{part}.weight") is None
    assert type_of(policy, f"{TEXT}.layers.0.linear_attn.{part}_x.weight") == asked
    assert type_of(policy, "lm_head.weight") == EIGHT_BIT[asked]


@pytest.mark.parametrize(
    ("layers", "promoted"),
    [
        (30, [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]),
        (16, [0, 1, 4, 7, 10, 13, 14, 15]),
        (8, [0, 3, 6, 7]),
        (7, [2, 5, 6]),
        (1, [0]),
    ],
)
@pytest.mark.parametrize("asked", FOUR_BIT)
@pytest.mark.parametrize("architecture", [GEMMA4, COHERE2, GLIMMER])
def test_layers_with_more_bits(
    architecture: str, asked: str, layers: int, promoted: list[int]
) -> None:
    policy = policy_of(architecture, asked, num_hidden_layers=layers)
    assert promoted_layers(policy, "model.layers.{layer}.mlp.down_proj.weight", layers) == promoted


@pytest.mark.parametrize("asked", FP4)
def test_nemotron_gives_outputs_more_bits_at_the_same_layers(asked: str) -> None:
    policy = policy_of(NEMOTRON, asked, num_hidden_layers=8)
    for name in (
        "out_proj",
        "down_proj",
        "shared_experts.down_proj",
        "experts.3.down_proj",
        "experts.down_proj",
    ):
        assert promoted_layers(policy, f"backbone.layers.{{layer}}.mixer.{name}.weight", 8) == [
            0,
            3,
            6,
            7,
        ]


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        (GEMMA4, {"num_hidden_layers": 8, "text_config": {"num_hidden_layers": 80}}),
        (GEMMA4, {"num_hidden_layers": 0, "text_config": {"num_hidden_layers": 8}}),
        (GEMMA4, {"text_config": {"num_hidden_layers": 8}}),
        (GLIMMER, {"text_config": {"num_hidden_layers": 8}}),
        (COHERE2, {"num_hidden_layers": 8}),
        (
            NEMOTRON,
            {"llm_config": {"num_hidden_layers": 8}, "text_config": {"num_hidden_layers": 80}},
        ),
    ],
)
def test_number_of_layers_is_where_the_architecture_has_it(
    architecture: str, config: dict[str, Any]
) -> None:
    block = "mixer" if architecture == NEMOTRON else "mlp"
    policy = policy_of(architecture, "nvfp4", **config)
    assert promoted_layers(policy, f"model.layers.{{layer}}.{block}.down_proj.weight", 8) == [
        0,
        3,
        6,
        7,
    ]


@pytest.mark.parametrize(
    ("architecture", "config", "promoted"),
    [
        (GEMMA4, {"num_experts": 8}, []),
        (GLIMMER, {}, []),
        # Without layers, the general policy promotes all of them.
        (COHERE2, {"text_config": {"num_hidden_layers": 8}}, [0, 1, 2, 3]),
    ],
)
def test_without_a_number_of_layers_none_is_chosen(
    architecture: str, config: dict[str, Any], promoted: list[int]
) -> None:
    policy = policy_of(architecture, "int4", **config)
    assert promoted_layers(policy, "model.layers.{layer}.mlp.down_proj.weight", 4) == promoted


@pytest.mark.parametrize("value", ["ten", 10.0, True, -1, [10]])
@pytest.mark.parametrize("architecture", [GEMMA4, COHERE2, GLIMMER, LAGUNA, NEMOTRON])
def test_number_of_layers_that_is_none_is_refused(architecture: str, value: object) -> None:
    with pytest.raises(DocumentError, match="num_hidden_layers") as caught:
        policy_of(architecture, "int4", num_hidden_layers=value)
    assert caught.value.rule == "Q1"


@pytest.mark.parametrize(
    ("key", "value"), [("mlp_only_layers", [0, "1"]), ("mlp_layer_types", "dense")]
)
def test_kinds_of_layers_that_are_none_are_refused(key: str, value: object) -> None:
    config: dict[str, Any] = {key: value}
    with pytest.raises(DocumentError, match=key):
        policy_of(LAGUNA, "nvfp4", **config)


def test_odd_numbers_are_in_nobody_elses_way() -> None:
    policy = policy_of("LlamaForCausalLM", "int4", num_hidden_layers="ten", mlp_only_layers=3)
    assert not policy.rules


@every_type
@every_profile
@pytest.mark.parametrize("architecture", [GEMMA4, COHERE2, GLIMMER])
def test_embedding_gets_eight_bits(architecture: str, asked: str, profile: str) -> None:
    policy = policy_of(architecture, asked, profile, num_hidden_layers=8)
    assert policy.wants(f"{TEXT}.embed_tokens.weight", SHAPE)
    assert type_of(policy, f"{TEXT}.embed_tokens.weight") == EIGHT_BIT[asked]
    assert type_of(policy, f"{TEXT}.embed_tokens_per_layer.weight") is None


@pytest.mark.parametrize(
    ("architecture", "name", "cols", "given"),
    [
        (GEMMA4, "model.embed_tokens.weight", 48, "nvfp4"),
        (GLIMMER, "model.embed_tokens.weight", 48, "nvfp4"),
        (COHERE2, "model.embed_tokens.weight", 48, None),
        (NEMOTRON, "backbone.embeddings.weight", 48, None),
        (LAGUNA, "model.embed_tokens.weight", 48, None),
        (GEMMA4, "model.layers.0.mlp.down_proj.weight", 48, "nvfp4"),
        (COHERE2, "model.layers.0.mlp.down_proj.weight", 48, "nvfp4"),
        (NEMOTRON, "backbone.layers.0.mixer.q_proj.weight", 48, "nvfp4"),
        (GEMMA4, "model.layers.0.mlp.down_proj.weight", 24, None),
        (GEMMA4, "model.embed_tokens.weight", 24, None),
    ],
)
def test_where_eight_bits_do_not_fit(
    architecture: str, name: str, cols: int, given: str | None
) -> None:
    policy = policy_of(architecture, "nvfp4", num_hidden_layers=8)
    assert type_of(policy, name, (128, cols)) == given
    assert policy.wants(name, (128, cols))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.v_proj.bias", (4096,)),
        ("model.layers.0.self_attn.v_proj.bias", (64, 64)),
        ("model.layers.0.mlp.down_proj.weight", (4, 64, 64)),
        ("model.layers.0.mlp.down_proj.weight", (15, 64)),
        ("model.embed_tokens.weight", (2, 64, 64)),
    ],
)
@pytest.mark.parametrize("architecture", [GEMMA4, COHERE2])
def test_only_matrices_of_weights_are_promoted(
    architecture: str, name: str, shape: tuple[int, ...]
) -> None:
    policy = policy_of(architecture, "int4", num_hidden_layers=8)
    assert not policy.wants(name, shape)
    assert policy.quantization(name, shape) is None


@pytest.mark.parametrize("asked", FOUR_BIT)
@pytest.mark.parametrize(
    ("experts", "k", "v"),
    [(0, [], [0, 3, 6, 7]), (8, [*range(8)], [*range(8)]), (128, [], [0, 3, 6, 7])],
)
def test_gemma_promotes_k_only_with_eight_experts(
    asked: str, experts: int, k: list[int], v: list[int]
) -> None:
    policy = policy_of(GEMMA4, asked, text_config={"num_hidden_layers": 8, "num_experts": experts})
    assert promoted_layers(policy, f"{TEXT}.layers.{{layer}}.self_attn.k_proj.weight", 8) == k
    assert promoted_layers(policy, f"{TEXT}.layers.{{layer}}.self_attn.v_proj.weight", 8) == v


@every_type
@pytest.mark.parametrize(
    "name",
    [
        "model.vision_tower.encoder.layers.0.self_attn.v_proj.linear.weight",
        "model.audio_tower.layers.0.mlp.down_proj.linear.weight",
        "model.embed_audio.embedding_projection.weight",
        "model.layers.0.router.proj.weight",
        "model.layers.0.input_layernorm.weight",
    ],
)
def test_gemma_leaves_alone_what_the_general_policy_does(name: str, asked: str) -> None:
    policy = policy_of(GEMMA4, asked, num_hidden_layers=8)
    assert not policy.wants(name, SHAPE)
    assert type_of(policy, name) is None


@every_type
@pytest.mark.parametrize(
    "name",
    [
        "vision_model.radio_model.model.patch_generator.proj.weight",
        "mlp1.0.weight",
        "sound_encoder.encoder.layers.0.self_attn.q_proj.weight",
        "sound_projection.adapter.weight",
        "language_model.backbone.layers.0.mixer.gate.weight",
        "language_model.backbone.layers.0.mixer.conv1d.weight",
    ],
)
def test_nemotron_keeps_other_modalities_gates_and_convolutions(name: str, asked: str) -> None:
    policy = policy_of(NEMOTRON, asked, num_hidden_layers=52)
    assert not policy.wants(name, SHAPE)
    assert type_of(policy, name) is None


@pytest.mark.parametrize("asked", FP4)
def test_nemotron_gives_attention_eight_bits_at_every_layer(asked: str) -> None:
    policy = policy_of(NEMOTRON, asked, num_hidden_layers=8)
    for part in "qkvo":
        assert promoted_layers(
            policy, f"backbone.layers.{{layer}}.mixer.{part}_proj.weight", 8
        ) == [*range(8)]
    assert promoted_layers(policy, "backbone.layers.{layer}.mixer.in_proj.weight", 8) == []
    assert type_of(policy, "mtp.mixer.out_proj.weight") == "mxfp8"  # no layer at all
