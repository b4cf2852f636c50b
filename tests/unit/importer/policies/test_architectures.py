"""Policies of single architectures: names, config.json, layers, shapes; and of drafts.

Those that no record holds (Glimmer, Laguna, drafts) decide what Ollama's own tests ask for
(ollama/ollama x/create glimmer_test.go, laguna_test.go).
"""

import json
from typing import Any

import pytest

from blobstore.errors import DocumentError
from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.dtypes import QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.policy import Policy, policy_for

SHAPE = (128, 128)
TEXT = "model.language_model"
GEMMA4, COHERE2 = "Gemma4ForCausalLM", "Cohere2MoeForCausalLM"
GLIMMER, LAGUNA = "MuseGlimmerForConditionalGeneration", "LagunaForCausalLM"
NEMOTRON = "NemotronHForCausalLM"
DOWN = "model.layers.{layer}.mlp.down_proj.weight"


def policy_of(
    architecture: str, asked: str, profile: str = "ollama", *, draft: bool = False, **config: Any
) -> Policy:
    source = SourceConfig.parse(json.dumps({"architectures": [architecture], **config}).encode())
    options = ImportOptions.parse(quant=asked, profile=profile)
    return policy_for(source, QuantType.parse(asked), options, is_draft=draft)


def type_of(policy: Policy, name: str, shape: tuple[int, ...] = SHAPE) -> str | None:
    quantization = policy.quantization(name, shape)
    return None if quantization is None else quantization.quant_type.value


def promoted(policy: Policy, layers: int, name: str = DOWN) -> list[int]:
    """Return the layers at which ``name`` gets eight bits."""
    types = [type_of(policy, name.format(layer=layer)) for layer in range(layers)]
    return [layer for layer, given in enumerate(types) if given in ("int8", "mxfp8")]


def test_the_architectures_of_ollamas_registry_have_policies_of_their_own() -> None:
    special = (
        *("Qwen3_5ForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3NextForCausalLM"),
        *("Gemma4ForConditionalGeneration", "Gemma4UnifiedForCausalLM", "gemma4_unified_text"),
        *(NEMOTRON, "NemotronH_Nano_Omni_Reasoning_V3", GLIMMER, COHERE2, LAGUNA),
    )
    general = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Cohere2ForCausalLM", "gemma4", "")
    for profile in ("default", "ollama"):
        assert [name for name in special if not policy_of(name, "int4", profile).rules] == []
        assert [name for name in general if policy_of(name, "int4", profile).rules] == []


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        (30, [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]),
        (16, [0, 1, 4, 7, 10, 13, 14, 15]),
        (1, [0]),
    ],
)
def test_first_last_and_every_third_layer_have_more_bits(layers: int, wanted: list[int]) -> None:
    for architecture in (GEMMA4, COHERE2, GLIMMER):
        policy = policy_of(architecture, "nvfp4", num_hidden_layers=layers)
        assert promoted(policy, layers) == wanted
    assert promoted(policy_of(GEMMA4, "nvfp4", num_experts=8), 4) == []


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        (GEMMA4, "num_hidden_layers", "ten"),
        (LAGUNA, "num_hidden_layers", -1),
        (LAGUNA, "mlp_only_layers", [0, "1"]),
    ],
)
def test_odd_numbers_and_kinds_of_layers(architecture: str, key: str, value: object) -> None:
    config: dict[str, Any] = {key: value}
    with pytest.raises(DocumentError, match=key) as caught:
        policy_of(architecture, "nvfp4", **config)
    assert caught.value.rule == "Q1"
    assert not policy_of("LlamaForCausalLM", "int4", **config).rules  # nobody reads them there


def test_glimmer() -> None:
    policy = policy_of(GLIMMER, "nvfp4", text_config={"num_hidden_layers": 52})
    wanted = {
        "embed_tokens": "mxfp8",
        "lm_head": "mxfp8",
        "layers.6.self_attn.q_proj": "mxfp8",
        "layers.0.mlp.down_proj": "mxfp8",
        "layers.6.mlp.down_proj": "nvfp4",
        "layers.8.mlp.down_proj": "mxfp8",
        "layers.0.self_attn.gate_proj": "mxfp8",
        "layers.0.mlp.gate_proj": "nvfp4",
        "vision_tower.layers.0.self_attn.q_proj": None,
        "vision_projection": None,
    }
    found = {name: type_of(policy, f"{TEXT}.{name}.weight", (6656, 6656)) for name in wanted}
    assert found == wanted


LAGUNA_TYPES = {
    "model.embed_tokens": ("mxfp8", "mxfp8"),
    "lm_head": ("mxfp8", "mxfp8"),
    "model.layers.0.self_attn.v_proj": ("nvfp4", None),
    "model.layers.0.mlp.gate_proj": ("nvfp4", "mxfp8"),
    "model.layers.1.mlp.down_proj": (None, None),
    "model.layers.1.mlp.gate": (None, None),
    "model.layers.1.mlp.experts.0.gate_proj": ("nvfp4", "mxfp8"),
    "model.layers.1.mlp.experts.0.down_proj": ("nvfp4", None),
    "model.layers.5.mlp.experts.0.down_proj": ("nvfp4", "mxfp8"),
    "model.layers.1.mlp.shared_expert.down_proj": ("mxfp8", None),
    "model.layers.5.mlp.shared_expert.down_proj": ("nvfp4", None),
    "model.layers.13.mlp.shared_expert.down_proj": ("mxfp8", None),
    "model.layers.39.mlp.shared_expert.down_proj": ("mxfp8", None),
    "model.layers.1.other_proj": (None, None),
}


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 40, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        {"num_hidden_layers": 40, "mlp_only_layers": [0]},
        {"mlp_layer_types": ["dense", *["sparse"] * 39]},
        {},
    ],
)
def test_laguna(config: dict[str, Any]) -> None:
    for number, asked in enumerate(("nvfp4", "mxfp8")):
        policy = policy_of(LAGUNA, asked, **config)
        found = {name: type_of(policy, f"{name}.weight") for name in LAGUNA_TYPES}
        assert found == {name: types[number] for name, types in LAGUNA_TYPES.items()}
    stacks = "model.layers.{layer}.mlp.experts.down_proj.weight"
    assert type_of(policy, stacks.format(layer=1), (2, *SHAPE)) is None
    assert type_of(policy, stacks.format(layer=5), (2, *SHAPE)) == "mxfp8"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", LAGUNA, NEMOTRON])
def test_a_draft_gives_embedding_and_head_the_asked_type(architecture: str) -> None:
    draft = policy_of(architecture, "int8", draft=True, num_hidden_layers=8)
    own = policy_of(architecture, "int8", num_hidden_layers=8)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert type_of(draft, name) == "int8"
        assert type_of(draft, name, (128, 40)) is None
    for rest in ("mlp1.0", "backbone.layers.1.mixer.out_proj", "layers.0.mlp.down_proj"):
        assert draft.types(f"{rest}.weight", SHAPE) == own.types(f"{rest}.weight", SHAPE)
