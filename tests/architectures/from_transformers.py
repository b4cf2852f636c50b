"""The recipes of architectures whose checkpoints transformers saves as they are published.

A recipe: what differs from `made_by_transformers.TINY`, and what config.json has besides.
"""

from __future__ import annotations

from typing import Any

from architectures.made_by_transformers import REMOVED

_YARN = {
    "type": "yarn",
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [1.0] * 16,
    "original_max_position_embeddings": 256,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
_GEMMA4 = {
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 320,
    "global_head_dim": 512,
}
_GEMMA4_MOE = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
}
_QWEN35 = {"num_hidden_layers": 4}
_THETA = 500_000.0

PLAIN = (
    *(
        "cohere",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "falcon_mamba",
        "gemma",
        "gemma2",
        "glm",
    ),
    *(
        "glm4",
        "glm4_moe_lite",
        "granite",
        "granitemoe",
        "helium",
        "hunyuan_v1_dense",
        "internlm3",
        "iquestcoder",
        "laguna",
    ),
    *(
        "llama",
        "llava",
        "mamba",
        "mellum",
        "ministral3",
        "mistral",
        "mistral4",
        "mixtral",
        "nemotron",
        "nemotron_h",
        "olmo2",
    ),
    *(
        "olmoe",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    ),
)
"""Architectures that need nothing special."""

SPECIAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "afmoe": (
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        {},
    ),
    "apertus": ({}, {"mlp_bias": False, "post_norm": False, "qk_norm": True}),
    "bitnet": ({}, {}),
    "cohere2": ({"num_hidden_layers": 4}, {"sliding_window_pattern": 4}),
    "deepseek_v2": ({}, {"rope_scaling": {**_YARN, "beta_fast": 32, "beta_slow": 1}}),
    "exaone4": ({"num_hidden_layers": 4}, {"head_dim": 32, "sliding_window_pattern": "LLLG"}),
    "exaone_moe": ({}, {"head_dim": 32, "is_moe_layer": [False, True]}),
    "falcon_h1": ({**_MAMBA, "mamba_d_ssm": 256}, {"head_dim": 32}),
    "gemma3": (
        {"text_config": {"num_hidden_layers": 6}},
        {"vocab_size": 320, "text_config": {"sliding_window_pattern": 6}},
    ),
    "gemma3_text": ({"num_hidden_layers": 6}, {"sliding_window_pattern": 6}),
    "gemma4": ({"text_config": _GEMMA4}, {"vocab_size": 320}),
    "gemma4_text": (_GEMMA4, {}),
    "glm4_moe": ({}, {"head_dim": 32}),
    "glm_moe_dsa": (
        {"num_hidden_layers": 3},
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    ),
    "gpt_bigcode": ({"n_inner": 256}, {}),
    "gpt_neox": ({"intermediate_size": 512}, {"rotary_emb_base": 10000, "rotary_pct": 0.25}),
    "gpt_oss": ({}, {}),
    "gptj": ({"rotary_dim": 16}, {}),
    "granitemoehybrid": (
        {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
        {"layer_types": ["mamba", "attention"]},
    ),
    "jamba": (
        {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
        {"layers_block_type": REMOVED},
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, {"block_dim": 128}),
    "lfm2_moe": (
        {
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "layer_types": ["conv", "conv", "full_attention"],
        },
        {},
    ),
    "llama4": ({"text_config": {"num_hidden_layers": 4, "num_experts_per_tok": 1}}, {}),
    "mamba2": (
        {"num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 16},
        {"intermediate_size": 256},
    ),
    "minicpm3": ({"v_head_dim": 32}, {"rope_scaling": _LONGROPE}),
    "minimax_m2": ({}, {"shared_intermediate_size": 0, "rotary_dim": 16}),
    "minimax_m3_vl": ({"text_config": {"rotary_dim": 16}}, {}),
    "mistral3": ({}, {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}}),
    "muse_spark": ({"audio_config": {"num_hidden_layers": 4, "out_hidden_size": 128}}, {}),
    "olmo": ({}, {}),
    "olmo3": ({"num_hidden_layers": 4}, {"rope_theta": _THETA}),
    "phimoe": ({"attention_bias": True, "lm_head_bias": True}, {}),
    "qwen3_5": ({"text_config": _QWEN35}, {}),
    "qwen3_moe": ({}, {"head_dim": 32}),
    "qwen3_next": ({"num_hidden_layers": 4}, {}),
    "qwen3_vl": ({}, {"text_config": {"tie_word_embeddings": False}}),
    "solar_open": (
        {},
        {"intermediate_size": 256, "first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
    ),
}
"""Overrides and additions to config.json, by model type."""

VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "deepseek_v3, no q_lora": ("deepseek_v3", {"q_lora_rank": None}, {}),
    "deepseek_v3, narrow heads": ("deepseek_v3", {"qk_nope_head_dim": 32, "v_head_dim": 32}, {}),
    "gemma4, mixture": ("gemma4", {"text_config": {**_GEMMA4, **_GEMMA4_MOE}}, {"vocab_size": 320}),
    "granitemoehybrid, dense": (
        "granitemoehybrid",
        {
            **_MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 256,
            "layer_types": ["linear_attention", "full_attention"],
        },
        {"layer_types": ["mamba", "attention"]},
    ),
    "llama, tied": ("llama", {"tie_word_embeddings": True}, {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}, {}),
}
"""Model type, overrides and additions, by the name of the row."""
