"""What a name and a shape say of a tensor in real architectures, and which type it gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.quant import QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.policy import policy_for

LAYER = "model.layers.3"
ROUTING_GATES = (
    f"{LAYER}.block_sparse_moe.gate.weight",  # mixtral, phimoe, minimax
    f"{LAYER}.block_sparse_moe.router.layer.weight",  # granitemoe
    f"{LAYER}.feed_forward.router.weight",  # llama4, jamba
    f"{LAYER}.mlp.router.weight",  # gpt-oss
    f"{LAYER}.moe.gate.weight",  # step3p5
    f"{LAYER}.mlp.gate.wg.weight",  # hunyuan
    f"{LAYER}.mlp.router.classifier.weight",  # longcat
)
STACKS = (
    f"{LAYER}.block_sparse_moe.input_linear.weight",  # granitemoe
    f"{LAYER}.mlp.input_linear.weight",  # jetmoe
    f"{LAYER}.moe.gate_proj.weight",  # step3p5
    f"{LAYER}.block_sparse_moe.switch_mlp.up_proj.weight",  # mlx-lm's mixtral, phimoe, minimax
    f"{LAYER}.feed_forward.switch_mlp.up_proj.weight",
)
TABLES = (
    "wte.weight",
    "transformer.wpe.weight",
    "shared.weight",  # T5
    "transformer.embd.wte.weight",  # Phi
    "transformer.word_embeddings.weight",  # Falcon
    "model.tok_embeddings.weight",  # InternLM2
)


def type_of(
    name: str, shape: tuple[int, ...], asked: str = "int4", profile: str = "default", **config: Any
) -> str | None:
    """Return the type that a tensor gets in a checkpoint of that config.json."""
    source = SourceConfig.parse(json.dumps(config).encode())
    options = ImportOptions.parse(quant=asked, profile=profile)
    policy = policy_for(source, QuantType.parse(asked), options)
    quantization = policy.quantization(name, shape)
    return None if quantization is None else quantization.quant_type.value


def test_stacks_of_experts_are_known_by_name_but_to_ollama() -> None:
    shape = (4, 64, 128)
    assert [type_of(name, shape) for name in STACKS] == ["int4"] * len(STACKS)
    assert [type_of(name, shape, profile="ollama") for name in STACKS] == [None] * len(STACKS)


def test_a_stack_of_as_many_matrices_as_there_are_experts() -> None:
    name = f"{LAYER}.ffn.bank.weight"
    assert type_of(name, (6, 64, 128)) is None
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        count: dict[str, Any] = {key: 6}
        assert type_of(name, (6, 64, 128), **count) == "int4"
        assert type_of(name, (6, 64, 128), text_config=count) == "int4"
    assert type_of(f"{LAYER}.mixer.conv1d.weight", (6, 64, 128), num_experts=6) is None
    assert type_of(name, (6, 64, 128), num_experts=[6, 6]) is None


def test_a_stacks_down_projection_is_an_experts() -> None:
    name = f"{LAYER}.moe.down_proj.weight"
    assert type_of(name, (4, 64, 128), "nvfp4") == "nvfp4"
    assert type_of(name, (64, 128), "nvfp4") == "mxfp8"


def test_biases_of_experts_and_experts_of_other_modalities_are_kept() -> None:
    for name in ("gate_up_proj_bias", "down_proj_bias", "0.up_proj.bias"):
        assert type_of(f"{LAYER}.mlp.experts.{name}", (64, 2880)) is None
    for profile in ("default", "ollama"):
        name = "visual.blocks.0.mlp.experts.0.up_proj.weight"
        assert type_of(name, (64, 128), profile=profile) is None


def test_routing_gates_have_a_row_for_each_expert() -> None:
    for name in ROUTING_GATES:
        assert type_of(name, (32, 128), num_local_experts=32) is None
        assert type_of(name, (64, 128), num_local_experts=32) == "int4"


def test_tables_of_tokens_and_positions_are_kept() -> None:
    assert [type_of(name, (640, 128)) for name in TABLES] == [None] * len(TABLES)
    for config in (
        {"vocab_size": 640},
        {"text_config": {"vocab_size": 640}},
        {"n_positions": 640},
        {"max_position_embeddings": 640},
    ):
        assert type_of("model.table.weight", (640, 128), **config) is None
    inside_a_layer = f"{LAYER}.self_attn.q_proj.weight"
    assert type_of(inside_a_layer, (640, 128), max_position_embeddings=640) == "int4"


def test_the_head_is_not_a_table() -> None:
    assert type_of("lm_head.weight", (640, 128), vocab_size=640) == "int8"
    for name in ("output.weight", "proj_out.weight", "transformer.output_layer.weight"):
        assert type_of(name, (640, 128), vocab_size=640) == "int4"


def test_a_projection_to_the_hidden_size_is_not_a_table_of_positions() -> None:
    llama2: dict[str, Any] = {
        "hidden_size": 4096,
        "max_position_embeddings": 4096,
        "vocab_size": 32000,
    }
    for name in ("fc.weight", "multi_modal_projector.linear_2.weight"):
        assert type_of(name, (4096, 8192), **llama2) == "int4"
        assert type_of(name, (4096, 4096), text_config=llama2) == "int4"
    assert type_of("model.places.weight", (4096, 512), **llama2 | {"hidden_size": 512}) is None
    gpt2: dict[str, Any] = {"n_embd": 1024, "n_positions": 1024}
    assert type_of("transformer.wpe.weight", (1024, 1024), **gpt2) is None


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"model_type": "bailing_moe", "norm_head": True}, True),
        ({"model_type": "bailing_moe", "norm_head": False}, False),
        ({"model_type": "baichuan_m1"}, True),
    ],
)
def test_a_head_that_mlx_lm_normalises_is_kept(config: dict[str, Any], kept: bool) -> None:
    assert type_of("lm_head.weight", (640, 128), **config) == (None if kept else "int8")
    assert type_of("lm_head.weight", (640, 128), profile="ollama", **config) == "int8"


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("model.norm.weight", (64, 64), "is a norm"),
        ("wte.weight", (64, 64), "is an embedding"),
        (f"{LAYER}.up_proj", (64, 64), "is not called a weight"),
        (f"{LAYER}.up_proj.weight", (8, 64), "has fewer than 1,024 weights"),
        (f"{LAYER}.up_proj.weight", (64, 33), "has rows of 33, not a multiple of 32"),
        (f"{LAYER}.up_proj.weight", (2048,), "is not a matrix"),
        (
            f"{LAYER}.conv.weight",
            (64, 4, 32),
            "has 3 dimensions and is not known as a stack of experts",
        ),
        (f"{LAYER}.linear_attn.in_proj_a.weight", (64, 64), "is kept by its architecture's policy"),
    ],
)
def test_what_is_kept_has_a_reason(name: str, shape: tuple[int, ...], reason: str) -> None:
    config = SourceConfig.parse(b'{"architectures": ["Qwen3NextForCausalLM"]}')
    policy = policy_for(config, QuantType.INT4, ImportOptions.parse(quant="int4"))
    assert policy.quantization(name, shape) is None
    assert policy.reason(name, shape) == reason
