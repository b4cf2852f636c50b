"""The policies that no record holds: Glimmer, Laguna, drafts.

The cases are the decisions that Ollama's own tests ask for (ollama/ollama x/create glimmer_test.go,
laguna_test.go); for Laguna's embedding and head, those of its code once Glimmer was there.
"""

from __future__ import annotations

from typing import Any

import pytest
from support import QUANT_TYPES
from support.policies import GLIMMER, LAGUNA, NEMOTRON, SHAPE, policy_of, promoted_layers, type_of

TEXT = "model.language_model"

every_type = pytest.mark.parametrize("asked", QUANT_TYPES)
every_profile = pytest.mark.parametrize("profile", ["default", "ollama"])

FFN, LARGE = (6656, 19968), (6656, 6656)


@pytest.mark.parametrize(
    ("name", "shape", "asked", "given"),
    [
        ("embed_tokens", LARGE, "nvfp4", "mxfp8"),
        ("embed_tokens", LARGE, "mxfp8", "mxfp8"),
        ("lm_head", LARGE, "nvfp4", "mxfp8"),
        ("lm_head", LARGE, "int4", "int8"),
        ("layers.6.self_attn.q_proj", LARGE, "nvfp4", "mxfp8"),
        ("layers.6.self_attn.o_proj", LARGE, "nvfp4", "mxfp8"),
        ("layers.6.self_attn.k_proj", (256, 6656), "int4", "int8"),
        ("layers.6.self_attn.v_proj", (256, 6656), "mxfp4", "mxfp8"),
        ("layers.0.mlp.down_proj", FFN, "nvfp4", "mxfp8"),
        ("layers.6.mlp.down_proj", FFN, "nvfp4", "nvfp4"),
        ("layers.8.mlp.down_proj", FFN, "nvfp4", "mxfp8"),
        ("layers.6.mlp.down_proj", FFN, "mxfp8", "mxfp8"),
        ("layers.6.mlp.down_proj", FFN, "int8", "int8"),
        ("layers.0.self_attn.gate_proj", LARGE, "nvfp4", "mxfp8"),
        ("layers.6.self_attn.gate_proj", LARGE, "nvfp4", "nvfp4"),
        ("layers.6.self_attn.output_gate_proj", LARGE, "int4", "int4"),
        ("layers.0.mlp.gate_proj", FFN, "nvfp4", "nvfp4"),
        ("vision_tower.layers.0.self_attn.q_proj", SHAPE, "int4", None),
        ("vision_adapter.fc1", SHAPE, "int4", None),
        ("vision_projection", LARGE, "nvfp4", None),
    ],
)
@every_profile
def test_glimmer(
    name: str, shape: tuple[int, ...], asked: str, given: str | None, profile: str
) -> None:
    policy = policy_of(GLIMMER, asked, profile, text_config={"num_hidden_layers": 52})
    assert type_of(policy, f"{TEXT}.{name}.weight", shape) == given
    assert policy.wants(f"{TEXT}.{name}.weight", shape) == (given is not None)


@pytest.mark.parametrize(
    ("name", "fp4", "mxfp8"),
    [
        ("model.embed_tokens", "mxfp8", "mxfp8"),
        ("lm_head", "mxfp8", "mxfp8"),
        ("model.layers.0.self_attn.v_proj", "asked", None),
        ("model.layers.5.self_attn.g_proj", "asked", None),
        ("model.layers.0.mlp.gate_proj", "asked", "mxfp8"),
        ("model.layers.0.mlp.down_proj", "asked", "mxfp8"),
        ("model.layers.1.mlp.down_proj", None, None),
        ("model.layers.1.mlp.gate", None, None),
        ("model.layers.1.mlp.experts.0.gate_proj", "asked", "mxfp8"),
        ("model.layers.1.mlp.experts.0.down_proj", "asked", None),
        ("model.layers.5.mlp.experts.0.down_proj", "asked", "mxfp8"),
        ("model.layers.1.mlp.shared_expert.gate_proj", "asked", "mxfp8"),
        ("model.layers.1.mlp.shared_expert.down_proj", "mxfp8", None),
        ("model.layers.5.mlp.shared_expert.down_proj", "asked", None),
        ("model.layers.7.mlp.shared_expert.down_proj", "mxfp8", None),
        ("model.layers.13.mlp.shared_expert.down_proj", "mxfp8", None),
        ("model.layers.16.mlp.shared_expert.down_proj", "asked", None),
        ("model.layers.39.mlp.shared_expert.down_proj", "mxfp8", None),
        ("model.layers.1.mlp.shared_expert_gate", None, None),
        ("model.layers.1.post_attention_layernorm", None, None),
        ("model.layers.1.other_proj", None, None),
    ],
)
@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 40, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        {"num_hidden_layers": 40, "mlp_only_layers": [0]},
        {"mlp_layer_types": ["dense", *["sparse"] * 39]},
        {},
    ],
)
def test_laguna(name: str, fp4: str | None, mxfp8: str | None, config: dict[str, Any]) -> None:
    for asked, given in (("nvfp4", fp4), ("mxfp4", fp4), ("mxfp8", mxfp8)):
        policy = policy_of(LAGUNA, asked, **config)
        assert type_of(policy, f"{name}.weight") == (asked if given == "asked" else given)
        assert policy.wants(f"{name}.weight", SHAPE) == (given is not None)


def test_laguna_of_stacked_experts() -> None:
    policy = policy_of(LAGUNA, "mxfp8", num_hidden_layers=40)
    assert type_of(policy, "model.layers.1.mlp.experts.gate_proj.weight", (2, *SHAPE)) == "mxfp8"
    assert type_of(policy, "model.layers.1.mlp.experts.down_proj.weight", (2, *SHAPE)) is None
    assert type_of(policy, "model.layers.5.mlp.experts.down_proj.weight", (2, *SHAPE)) == "mxfp8"


@pytest.mark.parametrize(
    ("config", "promoted"),
    [
        ({"num_hidden_layers": 42}, [0, 1, 2, 3, 4, 7, 10, 13, 16, 36, 37, 38, 39, 40, 41]),
        ({"num_hidden_layers": 16, "mlp_layer_types": ["dense"] * 42}, [0, 1, 14, 15]),
        ({"mlp_layer_types": ["sparse"] * 16}, [0, 1, 14, 15]),
    ],
)
def test_laguna_stops_giving_every_third_layer_more_bits_before_the_middle(
    config: dict[str, Any], promoted: list[int]
) -> None:
    policy = policy_of(LAGUNA, "nvfp4", **config)
    assert (
        promoted_layers(
            policy, "model.layers.{layer}.mlp.shared_expert.down_proj.weight", promoted[-1] + 1
        )
        == promoted
    )


def test_laguna_may_have_other_dense_layers() -> None:
    policy = policy_of(
        LAGUNA,
        "nvfp4",
        num_hidden_layers=40,
        mlp_only_layers=[2],
        mlp_layer_types=["sparse", "dense"],
    )
    given = [type_of(policy, f"model.layers.{layer}.mlp.up_proj.weight") for layer in range(4)]
    assert given == [None, "nvfp4", "nvfp4", None]


@pytest.mark.parametrize("asked", ["int4", "int8"])
def test_laguna_has_the_general_policy_for_int4_and_int8(asked: str) -> None:
    policy = policy_of(LAGUNA, asked, num_hidden_layers=40)
    assert type_of(policy, "lm_head.weight") == "int8"
    assert type_of(policy, "model.embed_tokens.weight") is None
    assert type_of(policy, "model.layers.1.mlp.down_proj.weight") == "int8"
    assert type_of(policy, "model.layers.1.other_proj.weight") == asked


@every_type
@every_profile
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma4AssistantForCausalLM", LAGUNA])
def test_draft_gives_embedding_and_head_the_asked_type(
    architecture: str, asked: str, profile: str
) -> None:
    policy = policy_of(architecture, asked, profile, draft=True, num_hidden_layers=1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert policy.wants(name, SHAPE)
        assert policy.types(name, SHAPE)[0][-1].value == asked
        assert type_of(policy, name) == asked
        assert type_of(policy, name, (128, 40)) is None


@every_type
def test_draft_gives_everything_else_what_its_architecture_does(asked: str) -> None:
    draft = policy_of(NEMOTRON, asked, draft=True, num_hidden_layers=8)
    own = policy_of(NEMOTRON, asked, num_hidden_layers=8)
    names = [
        "mlp1.0",
        "backbone.embeddings",
        "backbone.layers.0.mixer.q_proj",
        "backbone.layers.1.mixer.out_proj",
        "x.norm",
    ]
    for name in (f"{name}.weight" for name in names):
        assert draft.quantization(name, SHAPE) == own.quantization(name, SHAPE)
        assert draft.wants(name, SHAPE) == own.wants(name, SHAPE)
        assert draft.types(name, SHAPE) == own.types(name, SHAPE)
