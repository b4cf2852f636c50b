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
    f"{LAYER}.mlp.gate.wg.weight",  # hunyuan
    f"{LAYER}.mlp.router.classifier.weight",  # longcat
)
STACKS = (
    f"{LAYER}.block_sparse_moe.input_linear.weight",  # granitemoe
    f"{LAYER}.mlp.input_linear.weight",  # jetmoe
    f"{LAYER}.moe.gate_proj.weight",  # step3p5
    f"{LAYER}.block_sparse_moe.switch_mlp.up_proj.weight",  # mlx-lm's mixtral, phimoe, minimax
)
TABLES = (
    "wte.weight",
    "transformer.wpe.weight",
    "shared.weight",  # T5
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
    assert {type_of(name, shape) for name in STACKS} == {"int4"}
    assert {type_of(name, shape, profile="ollama") for name in STACKS} == {None}


def test_a_stack_of_as_many_matrices_as_there_are_experts() -> None:
    name = f"{LAYER}.ffn.bank.weight"
    assert type_of(name, (6, 64, 128)) is None
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        count: dict[str, Any] = {key: 6}
        assert type_of(name, (6, 64, 128), **count) == "int4"
        assert type_of(name, (6, 64, 128), text_config=count) == "int4"
    assert type_of(f"{LAYER}.mixer.conv1d.weight", (6, 64, 128), num_experts=6) is None


def test_routing_gates_have_a_row_for_each_expert() -> None:
    for name in ROUTING_GATES:
        assert type_of(name, (32, 128), num_local_experts=32) is None
        assert type_of(name, (64, 128), num_local_experts=32) == "int4"


def test_tables_of_tokens_and_positions_are_kept() -> None:
    assert {type_of(name, (640, 128)) for name in TABLES} == {None}
    for config in ({"vocab_size": 640}, {"text_config": {"n_positions": 640}}):
        assert type_of("model.table.weight", (640, 128), **config) is None
    inside_a_layer = f"{LAYER}.self_attn.q_proj.weight"
    assert type_of(inside_a_layer, (640, 128), max_position_embeddings=640) == "int4"
    assert type_of("lm_head.weight", (640, 128), vocab_size=640) == "int8"
    assert type_of("output.weight", (640, 128), vocab_size=640) == "int4"


def test_a_projection_to_the_hidden_size_is_not_a_table_of_positions() -> None:
    llama2: dict[str, Any] = {"hidden_size": 4096, "max_position_embeddings": 4096}
    projector = "multi_modal_projector.linear_2.weight"
    assert type_of(projector, (4096, 8192), **llama2) == "int4"
    assert type_of("model.places.weight", (4096, 512), **llama2 | {"hidden_size": 512}) is None


@pytest.mark.parametrize(
    ("config", "given"),
    [
        ({"model_type": "bailing_moe", "norm_head": True}, None),
        ({"model_type": "bailing_moe", "norm_head": False}, "int8"),
        ({"model_type": "baichuan_m1"}, None),
    ],
)
def test_a_head_that_mlx_lm_normalises_is_kept(config: dict[str, Any], given: str | None) -> None:
    assert type_of("lm_head.weight", (640, 128), **config) == given
    assert type_of("lm_head.weight", (640, 128), profile="ollama", **config) == "int8"


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("model.norm.weight", (64, 64), "norm"),
        ("wte.weight", (64, 64), "embedding"),
        (f"{LAYER}.up_proj", (64, 64), "not called a weight"),
        (f"{LAYER}.up_proj.weight", (8, 64), "1,024"),
        (f"{LAYER}.up_proj.weight", (64, 33), "rows of 33"),
        (f"{LAYER}.up_proj.weight", (2048,), "matrix"),
        (f"{LAYER}.conv.weight", (64, 4, 32), "3 dimensions"),
        (f"{LAYER}.linear_attn.in_proj_a.weight", (64, 64), "architecture"),
    ],
)
def test_what_is_kept_has_a_reason(name: str, shape: tuple[int, ...], reason: str) -> None:
    config = SourceConfig.parse(b'{"architectures": ["Qwen3NextForCausalLM"]}')
    policy = policy_for(config, QuantType.INT4, ImportOptions.parse(quant="int4"))
    assert policy.quantization(name, shape) is None
    assert reason in policy.reason(name, shape)
