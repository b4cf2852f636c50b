"""Counts of config.json are checked before mlx-lm builds an object for each."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import PYCODE

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.dtypes import DType
from blobstore.model.facts import TensorFacts
from blobstore.model.network import check_counts, plan_network

SHAPES = [(4096, 256)] * 30


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**9},
        {"n_layer": 1001},
        {"altup_num_inputs": 10**30},
        {"text_config": {"num_nextn_predict_layers": 10**6}},
        {"text_config": {"ffn_config": {"moe_num_experts": 4097}}},
        {"sliding_window_pattern": 10**9},
        {"num_attention_heads": 10**7},
    ],
)
def test_more_than_the_tensors_can_be_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSourceError, match="too many for 30 tensors"):
        check_counts(config, SHAPES)


@pytest.mark.parametrize(
    "config",
    [
        {
            "num_hidden_layers": 1000,
            "vision_config": {"num_hidden_layers": 60},
            "num_experts": 4096,
        },
        {
            "num_hidden_layers": -1,
            "n_routed_experts": None,
            "num_experts": [8, 8],
            "num_layers": 1e9,
        },
        {
            "vocab_size_per_layer_input": 262144,
            "max_position_embeddings": 10**7,
            "vocab_size": 10**6,
            "train_iters": 10**6,
        },
    ],
)
def test_other_numbers_pass(config: dict[str, Any]) -> None:
    check_counts(config, SHAPES)


def test_a_network_of_a_billion_layers_is_never_begun() -> None:
    config = {**json.loads((PYCODE / "config.json").read_text()), "num_hidden_layers": 10**9}
    tensor = TensorFacts("model.norm.weight", DType.BF16, (256,))
    with pytest.raises(
        UnsupportedSourceError, match="'num_hidden_layers' is '1000000000', too many for 1 tensors"
    ):
        plan_network(config, [tensor], "m")


@pytest.mark.parametrize("model_type", ["x\n\x1b[31m", "x" * 10**6, "..", "os", "llama.nn", "base"])
def test_a_hostile_model_type_is_told_in_one_short_line(model_type: str) -> None:
    with pytest.raises(UnsupportedSourceError, match="mlx-lm can't build model m: ") as caught:
        plan_network({"model_type": model_type}, [], "m")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400
