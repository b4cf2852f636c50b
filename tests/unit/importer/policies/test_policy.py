"""A tensor's type by its name and shape, and by what config.json says; single architectures."""

import json
from typing import Any

import pytest
from support import QUANT_TYPES

from blobstore.errors import DocumentError
from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.dtypes import QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.policy import Policy, policy_for

LAYER = "model.layers.0"
MLP = f"{LAYER}.mlp"
UP, DOWN, HEAD = f"{MLP}.up_proj.weight", f"{MLP}.down_proj.weight", "lm_head.weight"
TABLE = (640, 128)
EIGHT_BIT = {"int4": "int8", "int8": "int8", "nvfp4": "mxfp8", "mxfp4": "mxfp8", "mxfp8": "mxfp8"}
GROUPS = {"int4": 32, "int8": 64, "nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
ORDINARY = (f"{LAYER}.self_attn.q_proj.weight", UP, f"{MLP}.experts.3.up_proj.weight")
SENSITIVE = (f"{LAYER}.self_attn.v_proj.weight", f"{MLP}.shared_expert.down_proj.weight", HEAD)
SENSITIVE_EXPERTS = (
    f"{MLP}.experts.0.down_proj.weight",
    f"{MLP}.switch_mlp.down_proj.weight",
    "backbone.layers.0.mixer.shared_experts.down_proj.weight",
)
KEPT = (
    "model.embed_tokens.weight",
    "backbone.embeddings.weight",
    "transformer.ln_f.weight",
    "model.audio_tower.layers.0.ffw.weight",
    "model.vision_tower.layers.0.self_attn.v_proj.weight",
    "model.visual.blocks.0.attn.qkv.weight",
    f"{MLP}.gate.weight",
    f"{MLP}.shared_expert_gate.weight",
    f"{LAYER}.router.proj.weight",
    f"{MLP}.experts.3.up_proj.bias",
    f"{LAYER}.self_attn.q_proj",
)
ROUTING_GATES = (
    f"{LAYER}.block_sparse_moe.gate.weight",  # mixtral, phimoe, minimax
    f"{LAYER}.block_sparse_moe.router.layer.weight",  # granitemoe
    f"{LAYER}.feed_forward.router.weight",  # llama4, jamba
    f"{MLP}.gate.wg.weight",  # hunyuan
    f"{MLP}.router.classifier.weight",  # longcat
)
STACKS = (
    f"{LAYER}.block_sparse_moe.input_linear.weight",  # granitemoe
    f"{MLP}.input_linear.weight",  # jetmoe
    f"{LAYER}.moe.gate_proj.weight",  # step3p5
    f"{LAYER}.block_sparse_moe.switch_mlp.up_proj.weight",  # mlx-lm's mixtral, phimoe, minimax
)
TABLES = (
    "transformer.wpe.weight",
    "shared.weight",  # T5
    "transformer.word_embeddings.weight",  # Falcon
    "model.tok_embeddings.weight",  # InternLM2
)


def policy_of(asked: str, config: dict[str, Any], *, draft: bool = False, **options: Any) -> Policy:
    source = SourceConfig.parse(json.dumps(config).encode())
    parsed = ImportOptions.parse(quant=asked, **options)
    return policy_for(source, QuantType.parse(asked), parsed, is_draft=draft)


def type_of(
    name: str,
    shape: tuple[int, ...] = (128, 128),
    asked: str = "int4",
    profile: str = "default",
    group_size: int | None = None,
    **config: Any,
) -> str | None:
    """Return the type and group size that a tensor gets in a checkpoint of that config.json."""
    policy = policy_of(asked, config, profile=profile, group_size=group_size)
    quantization = policy.quantization(name, shape)
    return None if quantization is None else str(quantization)


@pytest.mark.parametrize("asked", QUANT_TYPES)
def test_a_tensors_type_by_its_name(asked: str) -> None:
    eight, experts = EIGHT_BIT[asked], "int8" if asked == "int4" else asked
    wanted = {
        **dict.fromkeys(ORDINARY, f"{asked}/{GROUPS[asked]}"),
        **dict.fromkeys(SENSITIVE, f"{eight}/{GROUPS[eight]}"),
        **dict.fromkeys(SENSITIVE_EXPERTS, f"{experts}/{GROUPS[experts]}"),
        **dict.fromkeys(KEPT, None),
    }
    assert {name: type_of(name, asked=asked) for name in wanted} == wanted


@pytest.mark.parametrize("asked", QUANT_TYPES)
def test_pure_is_one_type_for_all_that_can_have_it(asked: str) -> None:
    """A table of tokens, too, except one with a global scale, which mlx-lm does not run."""
    pure = policy_of(asked, {"architectures": ["Gemma4ForCausalLM"]}, pure=True)
    names = (KEPT[0], *ORDINARY, *SENSITIVE, *SENSITIVE_EXPERTS)
    types = {str(pure.quantization(name, (128, 128))) for name in names}
    assert types == {f"{asked}/{GROUPS[asked]}"}
    assert {pure.quantization(name, (128, 128)) for name in KEPT[1:]} == {None}
    assert pure.quantization(HEAD, (128, 24)) is None
    scaled = policy_of("nvfp4", {}, pure=True, global_scale=True)
    assert scaled.quantization(KEPT[0], (128, 128)) is None


@pytest.mark.parametrize(
    ("asked", "profile", "cols", "up", "down", "head"),
    [
        ("int4", "default", 32, "int4/32", "int4/32", None),
        ("int4", "default", 64, "int4/32", "int8/64", "int8/64"),
        ("int4", "ollama", 96, None, None, None),
        ("nvfp4", "default", 16, "nvfp4/16", "nvfp4/16", None),
        ("nvfp4", "ollama", 32, "nvfp4/16", "mxfp8/32", "mxfp8/32"),
    ],
)
def test_rows_must_be_whole_groups_of_the_type_or_of_eight_bits(
    asked: str, profile: str, cols: int, up: str | None, down: str | None, head: str | None
) -> None:
    """A head has eight bits or is kept; other sensitive weights have the asked type then."""
    found = [type_of(name, (256, cols), asked, profile) for name in (UP, DOWN, HEAD)]
    assert found == [up, down, head]


def test_a_given_group_size_is_that_of_the_asked_type_only() -> None:
    assert type_of(UP, group_size=128) == "int4/128"
    assert type_of(HEAD, group_size=128) == "int8/64"
    assert type_of(DOWN, (256, 64), group_size=128) is None
    assert type_of(UP, profile="ollama", group_size=32) == "int4/32"


def test_stacks_of_experts_are_known_by_name_but_to_ollama() -> None:
    assert {type_of(name, (4, 64, 128)) for name in STACKS} == {"int4/32"}
    assert {type_of(name, (4, 64, 128), profile="ollama") for name in STACKS} == {None}
    # What is an expert by its name is not tested for the words of norms and embeddings.
    assert type_of(f"{MLP}.experts.norm_proj.weight", (4, 64, 64)) == "int4/32"


def test_a_stack_of_as_many_matrices_as_there_are_experts() -> None:
    name, shape = f"{LAYER}.ffn.bank.weight", (6, 64, 128)
    assert type_of(name, shape) is None
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        count: dict[str, Any] = {key: 6}
        assert type_of(name, shape, **count) == type_of(name, shape, text_config=count) == "int4/32"
    assert type_of(f"{LAYER}.mixer.conv1d.weight", shape, num_experts=6) is None


def test_routing_gates_have_a_row_for_each_expert() -> None:
    for name in ROUTING_GATES:
        assert type_of(name, (32, 128), num_local_experts=32) is None
        assert type_of(name, (64, 128), num_local_experts=32) == "int4/32"


def test_tables_of_tokens_and_positions_are_kept() -> None:
    assert {type_of(name, TABLE) for name in TABLES} == {None}
    for config in ({"vocab_size": 640}, {"text_config": {"n_positions": 640}}):
        assert type_of("model.table.weight", TABLE, **config) is None
    assert type_of(UP, TABLE, max_position_embeddings=640) == "int4/32"  # inside a layer
    assert type_of(HEAD, TABLE, vocab_size=640) == "int8/64"
    assert type_of("output.weight", TABLE, vocab_size=640) == "int4/32"


def test_a_projection_to_the_hidden_size_is_not_a_table_of_positions() -> None:
    llama2: dict[str, Any] = {"hidden_size": 4096, "max_position_embeddings": 4096}
    assert type_of("multi_modal_projector.linear_2.weight", (4096, 8192), **llama2) == "int4/32"
    assert type_of("model.places.weight", (4096, 512), **llama2 | {"hidden_size": 512}) is None


@pytest.mark.parametrize(
    ("config", "given"),
    [
        ({"model_type": "bailing_moe", "norm_head": True}, None),
        ({"model_type": "bailing_moe", "norm_head": False}, "int8/64"),
        ({"model_type": "baichuan_m1"}, None),
    ],
)
def test_a_head_that_mlx_lm_normalises_is_kept(config: dict[str, Any], given: str | None) -> None:
    assert type_of(HEAD, TABLE, **config) == given
    assert type_of(HEAD, TABLE, profile="ollama", **config) == "int8/64"


# Policies of single architectures, and of drafts. Those that no record holds (Glimmer, Laguna,
# drafts) decide what Ollama's own tests ask for (ollama/ollama x/create glimmer_test.go,
# laguna_test.go).

SHAPE = (128, 128)
TEXT = "model.language_model"
GEMMA4, COHERE2 = "Gemma4ForCausalLM", "Cohere2MoeForCausalLM"
GLIMMER, LAGUNA = "MuseGlimmerForConditionalGeneration", "LagunaForCausalLM"
NEMOTRON = "NemotronHForCausalLM"
DOWN_AT = "model.layers.{layer}.mlp.down_proj.weight"


def own_policy(
    architecture: str, asked: str, profile: str = "ollama", *, draft: bool = False, **config: Any
) -> Policy:
    named = {"architectures": [architecture], **config}
    return policy_of(asked, named, draft=draft, profile=profile)


def kind_of(policy: Policy, name: str, shape: tuple[int, ...] = SHAPE) -> str | None:
    quantization = policy.quantization(name, shape)
    return None if quantization is None else quantization.quant_type.value


def promoted(policy: Policy, layers: int, name: str = DOWN_AT) -> list[int]:
    """Return the layers at which ``name`` gets eight bits."""
    types = [kind_of(policy, name.format(layer=layer)) for layer in range(layers)]
    return [layer for layer, given in enumerate(types) if given in ("int8", "mxfp8")]


def test_the_architectures_of_ollamas_registry_have_policies_of_their_own() -> None:
    special = (
        *("Qwen3_5ForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3NextForCausalLM"),
        *("Gemma4ForConditionalGeneration", "Gemma4UnifiedForCausalLM", "gemma4_unified_text"),
        *(NEMOTRON, "NemotronH_Nano_Omni_Reasoning_V3", GLIMMER, COHERE2, LAGUNA),
    )
    general = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Cohere2ForCausalLM", "gemma4", "")
    for profile in ("default", "ollama"):
        assert [name for name in special if not own_policy(name, "int4", profile).rules] == []
        assert [name for name in general if own_policy(name, "int4", profile).rules] == []


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
        policy = own_policy(architecture, "nvfp4", num_hidden_layers=layers)
        assert promoted(policy, layers) == wanted
    assert promoted(own_policy(GEMMA4, "nvfp4", num_experts=8), 4) == []


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
        own_policy(architecture, "nvfp4", **config)
    assert caught.value.rule == "Q1"
    assert not own_policy("LlamaForCausalLM", "int4", **config).rules  # nobody reads them there


def test_glimmer() -> None:
    policy = own_policy(GLIMMER, "nvfp4", text_config={"num_hidden_layers": 52})
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
    found = {name: kind_of(policy, f"{TEXT}.{name}.weight", (6656, 6656)) for name in wanted}
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
        policy = own_policy(LAGUNA, asked, **config)
        found = {name: kind_of(policy, f"{name}.weight") for name in LAGUNA_TYPES}
        assert found == {name: types[number] for name, types in LAGUNA_TYPES.items()}
    stacks = "model.layers.{layer}.mlp.experts.down_proj.weight"
    assert kind_of(policy, stacks.format(layer=1), (2, *SHAPE)) is None
    assert kind_of(policy, stacks.format(layer=5), (2, *SHAPE)) == "mxfp8"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", LAGUNA, NEMOTRON])
def test_a_draft_gives_embedding_and_head_the_asked_type(architecture: str) -> None:
    draft = own_policy(architecture, "int8", draft=True, num_hidden_layers=8)
    own = own_policy(architecture, "int8", num_hidden_layers=8)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert kind_of(draft, name) == "int8"
        assert kind_of(draft, name, (128, 40)) is None
    for rest in ("mlp1.0", "backbone.layers.1.mixer.out_proj", "layers.0.mlp.down_proj"):
        assert draft.types(f"{rest}.weight", SHAPE) == own.types(f"{rest}.weight", SHAPE)
