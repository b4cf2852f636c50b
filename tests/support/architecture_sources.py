"""Weights and configs of the recorded sources whose architectures have their own policy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from support.ollama_weights import (
    EXPERT,
    HIDDEN,
    INTERMEDIATE,
    KEYS,
    VOCABULARY,
    Weight,
    attention,
    mlp,
    norm,
)

Json = dict[str, Any]

TEXT = "model.language_model."
MAMBA_HEADS, CONVOLVED, TOWER = 8, 384, 128
NEMOTRON_H_LAYERS = "MEM*EMEM*E"
"""Its layers: Mamba, mixture of experts, attention."""

QWEN35_MOE: Json = json.loads("""{
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_text", "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 2048, "intermediate_size": 512,
        "max_position_embeddings": 4096
    },
    "vision_config": {"hidden_size": 128, "depth": 2}, "torch_dtype": "bfloat16"
}""")
NEMOTRON_H: Json = json.loads("""{
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256, "num_hidden_layers": 10,
    "hybrid_override_pattern": "MEM*EMEM*E", "vocab_size": 2048, "torch_dtype": "bfloat16",
    "n_routed_experts": 12
}""")
_GEMMA4 = """{
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text", "hidden_size": 256, "num_hidden_layers": 10,
        "vocab_size": 2048,
        "intermediate_size": 512, "max_position_embeddings": 4096
    },
    "vision_config": {"hidden_size": 128}, "audio_config": {"hidden_size": 128},
    "torch_dtype": "bfloat16"
}"""


def gemma4_config(layers: int, experts: int = 0) -> Json:
    """Return the config.json of a Gemma 4."""
    config: Json = json.loads(_GEMMA4)
    config["text_config"]["num_hidden_layers"] = layers
    return (
        config
        if experts == 0
        else {**config, "text_config": {**config["text_config"], "num_experts": experts}}
    )


def qwen35_moe() -> Iterator[Weight]:
    """Yield the weights of a Qwen3.5 mixture: two layers, and one that predicts ahead."""
    yield Weight(f"{TEXT}embed_tokens.weight", (VOCABULARY, HIDDEN))
    for layer in (f"{TEXT}layers.{number}" for number in range(2)):
        yield norm(f"{layer}.input_layernorm")
        yield Weight(f"{layer}.linear_attn.in_proj_ba.weight", (64, HIDDEN))
        yield Weight(f"{layer}.linear_attn.in_proj_qkvz.weight", (512, HIDDEN))
        yield Weight(f"{layer}.linear_attn.out_proj.weight", (HIDDEN, 256))
        yield Weight(f"{layer}.mlp.gate.weight", (8, HIDDEN))
        yield Weight(f"{layer}.mlp.experts.gate_up_proj", (8, 2 * EXPERT, HIDDEN))
        yield Weight(f"{layer}.mlp.experts.down_proj", (8, HIDDEN, EXPERT))
        yield from mlp(f"{layer}.mlp.shared_expert", EXPERT)
        yield Weight(f"{layer}.mlp.shared_expert_gate.weight", (1, HIDDEN))
    for expert in range(11):
        yield from mlp(f"mtp.layers.0.mlp.experts.{expert}", EXPERT)
    yield Weight("mtp.layers.0.mlp.gate.weight", (11, HIDDEN))
    yield norm(f"{TEXT}norm")
    yield Weight("lm_head.weight", (VOCABULARY, HIDDEN))


def gemma4(layers: int, *, experts: int = 0, keys: int = KEYS) -> Iterator[Weight]:
    """Yield the weights of a Gemma 4, dense or with stacked experts, with towers."""
    yield Weight(f"{TEXT}embed_tokens.weight", (VOCABULARY, HIDDEN))
    yield Weight(f"{TEXT}embed_tokens_per_layer.weight", (VOCABULARY, 64))
    yield Weight(f"{TEXT}per_layer_model_projection.weight", (layers * 16, HIDDEN))
    for layer in (f"{TEXT}layers.{number}" for number in range(layers)):
        yield from attention(layer, norms=True, keys=keys)
        yield from mlp(f"{layer}.mlp", INTERMEDIATE)
        yield norm(f"{layer}.input_layernorm")
        yield Weight(f"{layer}.layer_scalar", (1,))
        yield Weight(f"{layer}.per_layer_input_gate.weight", (64, HIDDEN))
        if experts:
            yield from _gemma4_experts(layer, experts)
    yield norm(f"{TEXT}norm")
    yield from _gemma4_towers()


def _gemma4_experts(layer: str, experts: int) -> Iterator[Weight]:
    yield Weight(f"{layer}.router.proj.weight", (experts, HIDDEN))
    yield Weight(f"{layer}.router.scale", (HIDDEN,))
    yield Weight(f"{layer}.router.per_expert_scale", (experts,))
    yield Weight(f"{layer}.experts.gate_up_proj", (experts, 2 * EXPERT, HIDDEN))
    yield Weight(f"{layer}.experts.down_proj", (experts, HIDDEN, EXPERT))


def _gemma4_towers() -> Iterator[Weight]:
    vision, audio = "model.vision_tower.encoder.layers.0", "model.audio_tower.layers.0"
    yield Weight(f"{vision}.self_attn.v_proj.linear.weight", (TOWER, TOWER))
    yield Weight(f"{vision}.mlp.down_proj.linear.weight", (TOWER, 256))
    yield Weight(f"{audio}.self_attn.v_proj.linear.weight", (TOWER, TOWER))
    yield Weight(f"{audio}.ffw.weight", (TOWER, TOWER))
    yield Weight("model.embed_vision.embedding_projection.weight", (HIDDEN, TOWER))
    yield Weight("model.embed_audio.embedding_projection.weight", (HIDDEN, TOWER))


def nemotron_h() -> Iterator[Weight]:
    """Yield the weights of a Nemotron-H: ten layers of its three kinds."""
    yield Weight("backbone.embeddings.weight", (VOCABULARY, HIDDEN))
    kinds = {"M": _mamba, "E": _nemotron_experts, "*": _nemotron_attention}
    for number, kind in enumerate(NEMOTRON_H_LAYERS):
        layer = f"backbone.layers.{number}"
        yield norm(f"{layer}.norm")
        yield from kinds[kind](f"{layer}.mixer")
    yield norm("backbone.norm_f")
    yield Weight("lm_head.weight", (VOCABULARY, HIDDEN))


def _mamba(mixer: str) -> Iterator[Weight]:
    yield Weight(f"{mixer}.in_proj.weight", (640, HIDDEN))
    yield Weight(f"{mixer}.conv1d.weight", (CONVOLVED, 1, 4))
    yield Weight(f"{mixer}.A_log", (MAMBA_HEADS,), dtype=np.dtype(np.float32))
    yield Weight(f"{mixer}.D", (MAMBA_HEADS,))
    yield Weight(f"{mixer}.dt_bias", (MAMBA_HEADS,))
    yield norm(f"{mixer}.norm")
    yield Weight(f"{mixer}.out_proj.weight", (HIDDEN, 256))


def _nemotron_experts(mixer: str) -> Iterator[Weight]:
    yield Weight(f"{mixer}.gate.weight", (12, HIDDEN))
    yield Weight(f"{mixer}.gate.e_score_correction_bias", (12,), dtype=np.dtype(np.float32))
    for expert in range(12):
        yield Weight(f"{mixer}.experts.{expert}.up_proj.weight", (EXPERT, HIDDEN))
        yield Weight(f"{mixer}.experts.{expert}.down_proj.weight", (HIDDEN, EXPERT))
    yield Weight(f"{mixer}.shared_experts.up_proj.weight", (256, HIDDEN))
    yield Weight(f"{mixer}.shared_experts.down_proj.weight", (HIDDEN, 256))


def _nemotron_attention(mixer: str) -> Iterator[Weight]:
    for projection, rows in (("q", HIDDEN), ("k", KEYS), ("v", KEYS), ("o", HIDDEN)):
        yield Weight(f"{mixer}.{projection}_proj.weight", (rows, HIDDEN))
