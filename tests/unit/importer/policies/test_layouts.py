"""Layouts: which tensors are stored as ``[..., in, out]``, by config.json and names."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from support.inventories import source_tensor

from blobstore.formats.checkpoint import SourceConfig
from blobstore.importer.options import PROFILES
from blobstore.importer.roles import inputs_first
from blobstore.source.weights import SourceWeight

Shapes = Mapping[str, tuple[int, ...]]
MLP = "model.layers.3.mlp.experts"
LANGUAGE = "model.language_model.layers.3.mlp.experts"
LLAMA4 = "language_model.model.layers.1.feed_forward.experts"
DBRX = "transformer.blocks.0.ffn.experts.mlp"


def turned(model_type: str, tensors: Shapes, profile: str = "default", **config: Any) -> set[str]:
    """Return the names of the tensors that are transposed in a checkpoint of that model type."""
    weights = [SourceWeight.plain(source_tensor(name, *shape)) for name, shape in tensors.items()]
    parsed = SourceConfig.parse(json.dumps({"model_type": model_type, **config}).encode())
    return set(inputs_first(weights, parsed, PROFILES[profile]))


def fused(experts: str) -> dict[str, tuple[int, ...]]:
    return {f"{experts}.gate_up_proj": (4, 64, 192), f"{experts}.down_proj": (4, 96, 64)}


@pytest.mark.parametrize(
    ("model_type", "tensors", "others"),
    [
        (
            "gpt_oss",
            fused(MLP),
            {f"{MLP}.gate_up_proj_bias": (4, 192), "model.layers.3.o_proj.weight": (64, 64)},
        ),
        ("qwen3_vl_moe", fused(LANGUAGE), {}),
        ("llama4", fused(LLAMA4), {f"{LLAMA4[:-7]}shared_expert.down_proj.weight": (64, 96)}),
        ("aria", {"language_model.model.layers.0.mlp.experts.fc2.weight": (4, 96, 64)}, {}),
        (
            "gpt2",
            {f"h.0.{name}.weight": (64, 64) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")}
            | {"transformer.h.11.crossattention.q_attn.weight": (64, 64)},
            {"wte.weight": (64, 64), "model.h.0.attn.c_attn.weight": (192, 64)},
        ),
        ("dbrx", {f"{DBRX}.w2": (256, 64)}, {f"{DBRX}.w1": (256, 64), f"{DBRX}.v1": (256, 64)}),
        ("gpt_bigcode", {}, {"transformer.h.0.attn.c_attn.weight": (96, 64)}),  # nn.Linear
        ("", {}, {"h.0.mlp.c_fc.weight": (64, 256)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_by_model_type(model_type: str, tensors: Shapes, others: Shapes) -> None:
    assert turned(model_type, {**tensors, **others}) == set(tensors)
    assert turned(model_type, {**tensors, **others}, "ollama") == set()


def test_a_shape_that_says_otherwise_counts_for_the_whole_checkpoint() -> None:
    config: dict[str, Any] = {"text_config": {"hidden_size": 64}}
    published = {f"{LANGUAGE}.gate_up_proj": (4, 64, 128), f"{LANGUAGE}.down_proj": (4, 64, 64)}
    assert turned("qwen3_vl_moe", published, **config) == set(published)
    newer = {f"{LANGUAGE}.gate_up_proj": (4, 128, 64), f"{LANGUAGE}.down_proj": (4, 64, 64)}
    assert turned("qwen3_vl_moe", newer, **config) == set()
