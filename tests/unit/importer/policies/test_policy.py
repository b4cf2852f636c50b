"""The general policy: a tensor's type by name and shape, in both profiles."""

from __future__ import annotations

import pytest
from support import QUANT_TYPES

from blobstore.formats.quant import QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.policy import Policy
from blobstore.source.weights import is_expert

ATTENTION = "model.layers.0.self_attn."
MLP = "model.layers.0.mlp."
PROFILES = ("default", "ollama")
SHAPE = (128, 128)

GROUPS = {
    "default": {"int4": 32, "int8": 64, "nvfp4": 16, "mxfp4": 32, "mxfp8": 32},
    "ollama": {"int4": 64, "int8": 64, "nvfp4": 16, "mxfp4": 32, "mxfp8": 32},
}
EIGHT_BIT = {"int4": "int8", "int8": "int8", "nvfp4": "mxfp8", "mxfp4": "mxfp8", "mxfp8": "mxfp8"}

every_type = pytest.mark.parametrize("asked", QUANT_TYPES)
every_profile = pytest.mark.parametrize("profile", PROFILES)


def _policy(asked: str, profile: str = "default", group_size: int | None = None) -> Policy:
    options = ImportOptions.parse(quant=asked, profile=profile, group_size=group_size)
    return Policy(QuantType.parse(asked), options)


def _decision(policy: Policy, name: str, shape: tuple[int, ...] = SHAPE) -> str | None:
    quantization = policy.quantization(name, shape)
    return None if quantization is None else str(quantization)


@every_type
@every_profile
@pytest.mark.parametrize(
    "name",
    [
        f"{ATTENTION}q_proj.weight",
        f"{ATTENTION}o_proj.weight",
        f"{ATTENTION}kv_b_proj.weight",
        f"{MLP}gate_proj.weight",
        f"{MLP}up_proj.weight",
        f"{MLP}shared_expert.up_proj.weight",
        f"{MLP}experts.3.up_proj.weight",
        f"{MLP}shared_experts.gate_proj.weight",
        "weight.weight",
    ],
)
def test_matrix_gets_the_asked_type_in_the_groups_of_the_profile(
    name: str, asked: str, profile: str
) -> None:
    assert _decision(_policy(asked, profile), name) == f"{asked}/{GROUPS[profile][asked]}"


@every_type
@every_profile
@pytest.mark.parametrize(
    "name",
    [
        f"{ATTENTION}v_proj.weight",
        f"{ATTENTION}k_proj.weight",
        f"{MLP}down_proj.weight",
        f"{MLP}shared_expert.down_proj.weight",
    ],
)
def test_sensitive_projection_gets_eight_bits(name: str, asked: str, profile: str) -> None:
    promoted = EIGHT_BIT[asked]
    assert _decision(_policy(asked, profile), name) == f"{promoted}/{GROUPS[profile][promoted]}"


@every_type
@every_profile
@pytest.mark.parametrize(
    "name",
    [
        f"{MLP}experts.0.down_proj.weight",
        f"{MLP}experts.down_proj",
        f"{MLP}switch_mlp.down_proj.weight",
        f"{MLP}shared_experts.down_proj.weight",
        "backbone.layers.0.mixer.shared_experts.down_proj.weight",
        "model.layers.0.moe.experts.2.down_proj.weight",
    ],
)
def test_sensitive_projection_of_experts_gets_eight_bits_for_int4_only(
    name: str, asked: str, profile: str
) -> None:
    given = "int8" if asked == "int4" else asked
    assert _decision(_policy(asked, profile), name) == f"{given}/{GROUPS[profile][given]}"


@pytest.mark.parametrize(
    ("asked", "profile", "cols", "decision"),
    [
        ("int4", "default", 32, "int4/32"),
        ("int4", "default", 96, "int4/32"),
        ("int4", "default", 64, "int8/64"),
        ("int4", "default", 48, None),
        ("int4", "ollama", 32, None),
        ("int4", "ollama", 64, "int8/64"),
        ("nvfp4", "default", 16, "nvfp4/16"),
        ("nvfp4", "ollama", 48, "nvfp4/16"),
        ("nvfp4", "ollama", 32, "mxfp8/32"),
        ("nvfp4", "ollama", 24, None),
        ("mxfp4", "ollama", 48, None),
    ],
)
def test_sensitive_projection_keeps_the_asked_type_where_eight_bits_do_not_fit(
    asked: str, profile: str, cols: int, decision: str | None
) -> None:
    assert _decision(_policy(asked, profile), f"{MLP}down_proj.weight", (256, cols)) == decision


def test_sensitive_projection_must_fit_the_asked_type_first() -> None:
    policy = _policy("int4", group_size=128)
    assert _decision(policy, f"{MLP}down_proj.weight", (256, 64)) is None
    assert _decision(policy, f"{MLP}down_proj.weight", (256, 128)) == "int8/64"


@every_type
@every_profile
@pytest.mark.parametrize("name", ["lm_head.weight", "model.lm_head.weight"])
def test_head_gets_eight_bits(name: str, asked: str, profile: str) -> None:
    promoted = EIGHT_BIT[asked]
    assert _decision(_policy(asked, profile), name) == f"{promoted}/{GROUPS[profile][promoted]}"


@pytest.mark.parametrize(
    ("asked", "cols", "decision"),
    [
        ("int4", 32, None),
        ("int4", 96, None),
        ("int8", 32, None),
        ("nvfp4", 16, None),
        ("nvfp4", 32, "mxfp8/32"),
    ],
)
@every_profile
def test_head_is_left_alone_where_eight_bits_do_not_fit(
    asked: str, cols: int, decision: str | None, profile: str
) -> None:
    assert _decision(_policy(asked, profile), "lm_head.weight", (256, cols)) == decision


def test_asked_group_size_is_that_of_the_asked_type_only() -> None:
    assert _decision(_policy("int4", group_size=128), f"{MLP}up_proj.weight") == "int4/128"
    assert _decision(_policy("int4", group_size=128), "lm_head.weight") == "int8/64"
    assert _decision(_policy("int8", group_size=32), "lm_head.weight", (64, 32)) == "int8/32"


@pytest.mark.parametrize(
    ("asked", "cols", "default", "ollama"),
    [
        ("int4", 32, True, False),
        ("int4", 64, True, True),
        ("int4", 96, True, False),
        ("int4", 48, False, False),
        ("int8", 32, False, False),
        ("int8", 192, True, True),
        ("nvfp4", 16, True, True),
        ("nvfp4", 24, False, False),
        ("mxfp4", 32, True, True),
        ("mxfp4", 48, False, False),
        ("mxfp8", 96, True, True),
        ("mxfp8", 80, False, False),
    ],
)
def test_rows_must_be_whole_groups(asked: str, cols: int, *, default: bool, ollama: bool) -> None:
    for profile, fits in (("default", default), ("ollama", ollama)):
        policy = _policy(asked, profile)
        assert policy.wants(f"{MLP}up_proj.weight", (128, cols))
        assert (_decision(policy, f"{MLP}up_proj.weight", (128, cols)) is not None) == fits


def test_ollama_takes_only_multiples_of_64_in_smaller_groups_too() -> None:
    policy = _policy("int4", "ollama", group_size=32)
    assert _decision(policy, f"{MLP}up_proj.weight", (128, 96)) is None
    assert _decision(policy, f"{MLP}up_proj.weight", (128, 64)) == "int4/32"


@every_type
@every_profile
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "backbone.embeddings.weight",
        "transformer.ln_f.weight",
        "model.layers.0.input_layernorm.weight",
        "model.norm.weight",
        f"{ATTENTION}q_norm.weight",
        "model.audio_tower.layers.0.ffw.weight",
        "model.embed_audio.projection.weight",
        "model.vision_tower.layers.0.self_attn.v_proj.weight",
        "model.visual.blocks.0.attn.qkv.weight",
        f"{MLP}gate.weight",
        "backbone.layers.1.mixer.gate.weight",
        f"{MLP}shared_expert_gate.weight",
        "model.layers.0.router.proj.weight",
        f"{ATTENTION}q_proj.bias",
        f"{MLP}experts.3.up_proj.bias",
        f"{MLP}experts.3.up_proj.scale",
        f"{MLP}experts.3.up_proj.qbias",
        f"{ATTENTION}q_proj",
        f"{ATTENTION}q_proj.weight_scale",
        "model.layers.0.linear_attn.A_log",
    ],
)
def test_left_alone(name: str, asked: str, profile: str) -> None:
    policy = _policy(asked, profile)
    assert not policy.wants(name, SHAPE)
    assert policy.quantization(name, SHAPE) is None


@every_type
@pytest.mark.parametrize(
    "name",
    [
        f"{MLP}experts.gate_up_proj",
        f"{MLP}experts.norm_proj.weight",
        "model.embed.layers.0.mlp.experts.up_proj",
        "model.layers.0.experts.gate_up_proj",
        "backbone.layers.0.mixer.shared_experts.up_proj.weight",
    ],
)
def test_experts_skip_the_tests_of_names(name: str, asked: str) -> None:
    assert _decision(_policy(asked), name, (4, *SHAPE)) == f"{asked}/{GROUPS['default'][asked]}"


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((31, 33), False),
        ((1, 1023), False),
        ((1, 1024), True),
        ((32, 32), True),
        ((0, 64), False),
        ((64, 0), False),
    ],
)
def test_fewer_than_1024_elements_are_left_alone(shape: tuple[int, ...], *, wanted: bool) -> None:
    assert _policy("int4").wants(f"{MLP}up_proj.weight", shape) == wanted


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        (f"{MLP}up_proj.weight", (), False),
        (f"{MLP}up_proj.weight", (4096,), False),
        (f"{MLP}up_proj.weight", (4, 64, 64), False),
        (f"{MLP}up_proj.weight", (1, 4, 64, 64), False),
        (f"{MLP}experts.0.up_proj.weight", (4096,), False),
        (f"{MLP}experts.0.up_proj.weight", (64, 64), True),
        (f"{MLP}switch_mlp.up_proj.weight", (4, 64, 64), True),
        (f"{MLP}experts.gate_up_proj", (1, 4, 64, 64), False),
    ],
)
def test_only_matrices_and_stacks_of_experts_are_wanted(
    name: str, shape: tuple[int, ...], *, wanted: bool
) -> None:
    assert _policy("int4").wants(name, shape) == wanted
    assert (_policy("int4").quantization(name, shape) is not None) == wanted


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        (f"{MLP}experts.0.up_proj.weight", True),
        (f"{MLP}experts.gate_up_proj", True),
        (f"{MLP}switch_mlp.up_proj.weight", True),
        (f"{MLP}shared_experts.up_proj.weight", True),
        ("backbone.layers.0.mixer.experts.0.up_proj.weight", True),
        ("backbone.layers.0.mixer.shared_experts.up_proj.weight", True),
        ("model.layers.0.moe.experts.0.up_proj.weight", True),
        (f"{MLP}experts.0.up_proj.bias", False),
        (f"{MLP}experts.0.up_proj.scale", False),
        (f"{MLP}experts.0.up_proj.qbias", False),
        (f"{MLP}shared_expert.up_proj.weight", False),
        (f"{MLP}shared_expert_gate.weight", False),
        (f"{MLP}gate.weight", False),
        (f"{MLP}up_proj.weight", False),
        ("model.layers.0.experts_bias", False),
    ],
)
def test_experts_are_known_by_name(name: str, *, expert: bool) -> None:
    assert is_expert(name) == expert
