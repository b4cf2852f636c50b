"""The recipes of architectures without experts whose checkpoints are made from mlx-lm's network.

A recipe: the model type, what differs from `made_by_transformers.TINY`, and what undoes mlx-lm's
``sanitize``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from architectures.made_by_mlx_lm import Undo, convolutions, renamed, shaped, transposed
from architectures.made_by_transformers import TINY

Recipe = tuple[str, Mapping[str, Any], Sequence[Undo]]

PLAIN = {"rms_norm_eps": 1e-5, "rope_theta": 1e4}
SMALL = {
    key: TINY[key]
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
    )
}
TEXT = {**SMALL, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_LFM2 = {
    **SMALL,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": False,
    "block_ff_dim": 256,
    "layer_types": ["conv", "full_attention"],
}
_BLOCK = {"ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False}}
_NAS = [
    {**_BLOCK, "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False}},
    {
        **_BLOCK,
        "attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False},
    },
]
_GEMMA3N = {
    **TEXT,
    "num_hidden_layers": 4,
    "intermediate_size": [256] * 4,
    "head_dim": 32,
    "num_kv_shared_layers": 1,
    "vocab_size_per_layer_input": 320,
    "sliding_window": 16,
    "max_position_embeddings": 256,
    "rope_local_base_freq": 1e4,
    "rope_theta": 1e6,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    "hidden_size_per_layer_input": 32,
    "altup_num_inputs": 4,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 32,
    "model_type": "gemma3n_text",
}
_FALCON_H1 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_ssm": 256,
    "mamba_d_state": 16,
    "mlp_multipliers": [0.88, 0.58],
    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
}
_MAMBA2 = {
    "num_heads": 8,
    "n_groups": 1,
    "intermediate_size": 256,
    "state_size": 16,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
    "time_step_rank": 8,
}
_NEMOTRON_H = {
    "hybrid_override_pattern": "M-*M",
    "attention_bias": False,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "mamba_proj_bias": False,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 2,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.0, float("inf")],
}

RECIPES: dict[str, Recipe] = {
    "afm7": (
        "afm7",
        {
            "hidden_dim": 128,
            "num_layers": 2,
            "num_kv_reuse_layers": 1,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        [],
    ),
    "exaone": ("exaone", {"rope_theta": 1e4, "layer_norm_epsilon": 1e-5}, []),
    "gemma3n": ("gemma3n", {"text_config": _GEMMA3N}, []),
    "gear": (
        "gear",
        {"rms_norm_eps": 1e-5, "layer_types": ["sliding_attention", "full_attention"]},
        [convolutions],
    ),
    "gpt2": (
        "gpt2",
        {"n_ctx": 256, "layer_norm_epsilon": 1e-5},
        [
            renamed(r"^model\.", ""),
            transposed(r"(c_attn|c_proj|c_fc)\.weight$"),
        ],
    ),
    "internlm2": ("internlm2", {"rms_norm_eps": 1e-5}, []),
    "iquestloopcoder": ("iquestloopcoder", {"rms_norm_eps": 1e-5}, []),
    "lfm2-vl": ("lfm2-vl", {"text_config": _LFM2}, []),
    "lille-130m": (
        "lille-130m",
        {"block_size": 256, "layer_norm_eps": 1e-5, "n_kv_heads": 2, "rope_theta": 1e4},
        [],
    ),
    "mamba2, Infinity": ("mamba2", _MAMBA2, [convolutions]),
    "mimo": ("mimo", {"rms_norm_eps": 1e-5}, []),
    "minicpm": (
        "minicpm",
        {"dim_model_base": 64, "rms_norm_eps": 1e-5, "scale_depth": 1.4, "scale_emb": 12},
        [],
    ),
    "muse_glimmer": ("muse_glimmer", {}, [renamed(r"^model\.", "model.language_model.")]),
    "nanbeige": ("nanbeige", {"rms_norm_eps": 1e-5}, []),
    "nanochat": ("nanochat", {}, []),
    "nemotron-nas": ("nemotron-nas", {"block_configs": _NAS}, []),
    "nemotron_h, dense": ("nemotron_h", _NEMOTRON_H, [convolutions]),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            "num_hidden_layers": 4,
            "rms_norm_eps": 1e-5,
            "linear_allow_neg_eigval": True,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "linear_num_key_heads": 4,
        },
        [convolutions],
    ),
    "openelm": (
        "openelm",
        {
            "head_dim": 32,
            "num_transformer_layers": 2,
            "model_dim": 128,
            "ffn_dim_divisor": 64,
            "num_query_heads": [4, 4],
            "num_kv_heads": [2, 2],
            "ffn_multipliers": [2.0, 2.0],
        },
        [],
    ),
    "phi3small": (
        "phi3small",
        {
            "dense_attention_every_n_layers": 2,
            "ff_intermediate_size": 256,
            "gegelu_limit": 20.0,
            "layer_norm_epsilon": 1e-5,
        },
        [],
    ),
    "pixtral": ("pixtral", {"text_config": {**TEXT, "head_dim": 32, "model_type": "llama"}}, []),
    "plamo": ("plamo", {"rms_norm_eps": 1e-5, "n_shared_head": 4}, []),
    "plamo2": (
        "plamo2",
        {"hidden_size_per_head": 32, "mamba_num_heads": 4, "mamba_d_state": 16},
        [convolutions],
    ),
    "plamo3": ("plamo3", {"sliding_window_pattern": 2}, []),
    "qwen": ("qwen", {"kv_channels": 32, "num_key_value_heads": 4}, []),
    "qwen2_vl": (
        "qwen2_vl",
        {"text_config": {**TEXT, "model_type": "qwen2_vl_text"}},
        [renamed(r"^language_model\.", "")],
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {"text_config": {**TEXT, "model_type": "qwen2_5_vl_text"}},
        [
            renamed(r"^language_model\.", ""),
        ],
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            **PLAIN,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "conv1d_width": 4,
            "attention_bias": False,
            "logits_soft_cap": 30.0,
            "attention_window_size": 64,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
        [convolutions],
    ),
    "rwkv7": (
        "rwkv7",
        {
            "norm_eps": 1e-5,
            "head_dim": 32,
            "a_low_rank_dim": 32,
            "v_low_rank_dim": 32,
            "gate_low_rank_dim": 32,
            "decay_low_rank_dim": 32,
        },
        [shaped(r"k_k|k_a|g_norm", (-1,))],
    ),
    "spark2_5": (
        "spark2_5",
        {
            "num_hidden_layers": 4,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
        [],
    ),
    "talkie": ("talkie", {}, []),
    "telechat3": ("telechat3", PLAIN, []),
    "youtu_llm": ("youtu_llm", {"q_lora_rank": 64, "num_key_value_heads": 4}, []),
}
"""Recipes whose ``sanitize`` moves weights only, by the name of the row."""

CHANGING: dict[str, Recipe] = {
    "falcon_h1, multipliers": ("falcon_h1", _FALCON_H1, [convolutions]),
    "baichuan_m1": ("baichuan_m1", {**PLAIN, "sliding_window_layers": [1], "conv_window": 2}, []),
}
"""Recipes whose ``sanitize`` computes other values."""

UNSOUND: dict[str, str] = {
    "phi3small": "MLX 0.32.4 corrupts the heap when it runs mlx-lm's network on a CPU."
}
"""Why mlx-lm's network of a row is not run, by the name of the row."""
