"""The general policy: a tensor's type by its name and shape.

What it decides in Ollama's profile is also compared with Ollama's (oracle/test_ollama_records.py).
"""

from __future__ import annotations

import pytest
from support import QUANT_TYPES

from blobstore.formats.quant import QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.policy import Policy

ATTENTION = "model.layers.0.self_attn."
MLP = "model.layers.0.mlp."
UP = f"{MLP}up_proj.weight"
EIGHT_BIT = {"int4": "int8", "int8": "int8", "nvfp4": "mxfp8", "mxfp4": "mxfp8", "mxfp8": "mxfp8"}
GROUPS = {"int4": 32, "int8": 64, "nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
ORDINARY = (f"{ATTENTION}q_proj.weight", UP, f"{MLP}experts.3.up_proj.weight")
SENSITIVE = (f"{ATTENTION}v_proj.weight", f"{MLP}shared_expert.down_proj.weight", "lm_head.weight")
SENSITIVE_EXPERTS = (
    f"{MLP}experts.0.down_proj.weight",
    f"{MLP}switch_mlp.down_proj.weight",
    "backbone.layers.0.mixer.shared_experts.down_proj.weight",
)
KEPT = (
    "model.embed_tokens.weight",
    "backbone.embeddings.weight",
    "transformer.ln_f.weight",
    "model.audio_tower.layers.0.ffw.weight",
    "model.vision_tower.layers.0.self_attn.v_proj.weight",
    "model.visual.blocks.0.attn.qkv.weight",
    f"{MLP}gate.weight",
    f"{MLP}shared_expert_gate.weight",
    "model.layers.0.router.proj.weight",
    f"{MLP}experts.3.up_proj.bias",
    f"{ATTENTION}q_proj",
)


def policy_of(asked: str, profile: str = "default", group_size: int | None = None) -> Policy:
    options = ImportOptions.parse(quant=asked, profile=profile, group_size=group_size)
    return Policy(QuantType.parse(asked), options)


def decision(policy: Policy, name: str, shape: tuple[int, ...] = (128, 128)) -> str | None:
    quantization = policy.quantization(name, shape)
    return None if quantization is None else str(quantization)


@pytest.mark.parametrize("asked", QUANT_TYPES)
def test_a_tensors_type_by_its_name(asked: str) -> None:
    policy, eight = policy_of(asked), EIGHT_BIT[asked]
    experts = "int8" if asked == "int4" else asked
    wanted = {
        **dict.fromkeys(ORDINARY, f"{asked}/{GROUPS[asked]}"),
        **dict.fromkeys(SENSITIVE, f"{eight}/{GROUPS[eight]}"),
        **dict.fromkeys(SENSITIVE_EXPERTS, f"{experts}/{GROUPS[experts]}"),
        **dict.fromkeys(KEPT, None),
    }
    assert {name: decision(policy, name) for name in wanted} == wanted


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
    policy = policy_of(asked, profile)
    names = (UP, f"{MLP}down_proj.weight", "lm_head.weight")
    assert [decision(policy, name, (256, cols)) for name in names] == [up, down, head]


def test_a_given_group_size_is_that_of_the_asked_type_only() -> None:
    policy = policy_of("int4", group_size=128)
    assert decision(policy, UP) == "int4/128"
    assert decision(policy, "lm_head.weight") == "int8/64"
    assert decision(policy, f"{MLP}down_proj.weight", (256, 64)) is None
    ollama = policy_of("int4", "ollama", group_size=32)
    assert decision(ollama, UP, (128, 64)) == "int4/32"


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        (UP, (1, 1023), False),
        (UP, (1, 1024), True),
        (UP, (4096,), False),
        (UP, (4, 64, 64), False),
        (f"{MLP}switch_mlp.up_proj.weight", (4, 64, 64), True),
        (f"{MLP}experts.gate_up_proj", (1, 4, 64, 64), False),
        # What is an expert by its name is not tested for the words of norms and embeddings.
        (f"{MLP}experts.norm_proj.weight", (4, 64, 64), True),
    ],
)
def test_large_matrices_and_stacks_of_experts_are_wanted(
    name: str, shape: tuple[int, ...], *, wanted: bool
) -> None:
    assert policy_of("int4").wants(name, shape) == wanted
