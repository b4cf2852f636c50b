"""Recipes of mixtures of experts made from mlx-lm's network, as in from_mlx_lm.py."""

from __future__ import annotations

from architectures.from_mlx_lm import PLAIN, SMALL, TEXT, Recipe
from architectures.made_by_mlx_lm import (
    convolutions,
    joined,
    latent_heads,
    less_one,
    parted,
    renamed,
    shaped,
    transposed,
    unstacked,
    whole_experts,
)

_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_GATE = renamed(r"gate\.gate_proj", "gate")
_BAILING = {**PLAIN, "norm_topk_prob": True, "num_shared_experts": 1}
_LINEAR = {"num_hidden_layers": 4, "layer_group_size": 2}
_KDA = {"head_dim": 32, "num_heads": 4, "short_conv_kernel_size": 4}
_LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
_DEEPSEEK = {
    **SMALL,
    **_LATENT,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
}
_LONGCAT = {
    **PLAIN,
    "zero_expert_num": 2,
    "routed_scaling_factor": 1.0,
    "attention_bias": False,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_MIMO_V2 = {
    "hybrid_layer_pattern": [0, 1],
    "moe_layer_freq": [0, 1],
    "add_swa_attention_sink_bias": True,
    "n_shared_experts": None,
    "add_full_attention_sink_bias": False,
    "sliding_window_size": 16,
    "routed_scaling_factor": None,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "layernorm_epsilon": 1e-5,
    "rope_theta": 5e6,
    "swa_rope_theta": 1e4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 32,
    "v_head_dim": 32,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "partial_rotary_factor": 0.334,
}
_KIMI_LINEAR = {
    **PLAIN,
    **_LATENT,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "num_shared_experts": 1,
    "num_key_value_heads": 4,
    "linear_attn_config": {**_KDA, "kda_layers": [1, 2], "full_attn_layers": [3]},
}
_KIMI_K3 = {
    **SMALL,
    **_LATENT,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "model_type": "kimi_linear",
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "linear_attn_config": {**_KDA, "kda_layers": [1, 2, 3], "full_attn_layers": [4]},
}
_HUNYUAN = {
    **PLAIN,
    "attention_bias": False,
    "num_shared_expert": 1,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "use_cla": False,
    "cla_share_factor": 2,
    "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
}
_KIMI_LINEAR_UNDO = [
    unstacked(names=_MIXTRAL),
    latent_heads,
    convolutions,
    renamed(r"([qkv])_conv\.conv", r"\1_conv1d"),
    renamed(r"mlp\.(experts|shared_experts|gate\.)", r"block_sparse_moe.\1"),
    renamed(r"mlp\.e_score", "block_sparse_moe.gate.e_score"),
]
_KIMI_K3_UNDO = [
    unstacked(names=_MIXTRAL),
    latent_heads,
    convolutions,
    parted("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    parted("qkv_conv.conv", ("q_conv1d", "k_conv1d", "v_conv1d")),
    renamed(r"mlp\.(experts|shared_experts|gate\.)", r"block_sparse_moe.\1"),
    renamed(r"mlp\.e_score", "block_sparse_moe.gate.e_score"),
]
_DEEPSEEK_V41_UNDO = [
    shaped(r"o_a_proj", (-1, 16)),
    unstacked("experts.switch_mlp", names=_MIXTRAL),
    *(
        renamed(pattern, published)
        for pattern, published in (
            (r"^model\.embed_tokens", "embed"),
            (r"^lm_head", "head"),
            (r"^model\.", ""),
            (r"shared_experts\.gate_proj", "shared_experts.w1"),
            (r"shared_experts\.down_proj", "shared_experts.w2"),
            (r"shared_experts\.up_proj", "shared_experts.w3"),
            (r"gate\.e_score_correction_bias", "gate.bias"),
            (r"\.q_a_norm\.", ".q_norm."),
            (r"\.q_a_proj\.", ".wq_a."),
            (r"\.q_b_proj\.", ".wq_b."),
            (r"\.kv_proj\.", ".wkv."),
            (r"\.o_a_proj\.", ".wo_a."),
            (r"\.o_b_proj\.", ".wo_b."),
            (r"\.sinks", ".attn_sink"),
            (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
            (r"\.input_layernorm\.", ".attn_norm."),
            (r"\.post_attention_layernorm\.", ".ffn_norm."),
            (r"\.self_attn\.", ".attn."),
            (r"\.mlp\.", ".ffn."),
        )
    ),
]
_STEP_UNDO = [
    renamed(r"\.mlp\.switch_mlp\.", ".moe."),
    renamed(r"\.mlp\.gate\.gate\.", ".moe.gate."),
    renamed(r"\.mlp\.gate\.router_bias", ".moe.router_bias"),
    renamed(r"\.mlp\.share_expert\.", ".share_expert."),
    less_one(r"norm.*\.weight$"),
]
_QWEN35_UNDO = [
    joined(
        ("switch_mlp.gate_proj", "switch_mlp.up_proj"), "experts.gate_up_proj", axis=1, weight=""
    ),
    renamed(r"switch_mlp\.down_proj\.weight", "experts.down_proj"),
    convolutions,
    less_one(r"(input_layernorm|post_attention_layernorm|model\.norm|q_norm|k_norm)\.weight$"),
    renamed(r"^language_model\.model\.", "model.language_model."),
    renamed(r"^language_model\.lm_head", "lm_head"),
]
_QWEN35_MOE = {
    **TEXT,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 64,
    "moe_intermediate_size": 64,
    "model_type": "qwen3_5_moe_text",
    "rope_parameters": {
        "type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}
_QWEN3_VL_MOE = {
    **TEXT,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "norm_topk_prob": True,
    "model_type": "qwen3_moe",
}
_QWEN3_NEXT = {
    **PLAIN,
    "num_hidden_layers": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": True,
}
_QWEN3_NEXT_UNDO = [
    unstacked(),
    convolutions,
    less_one(r"(input_layernorm|post_attention_layernorm|model\.norm|q_norm|k_norm)\.weight$"),
]

RECIPES: dict[str, Recipe] = {
    "bailing_hybrid": (
        "bailing_hybrid",
        {**_BAILING, **_LINEAR, "group_norm_size": 4, "routed_scaling_factor": 1.0},
        [
            unstacked(),
            latent_heads,
            _GATE,
        ],
    ),
    "bailing_moe": ("bailing_moe", _BAILING, [unstacked(), _GATE]),
    "bailing_moe_linear": (
        "bailing_moe_linear",
        {
            **_BAILING,
            **_LINEAR,
            "group_norm_size": 4,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
        },
        [unstacked(), _GATE],
    ),
    "bailing_moe_v3": (
        "bailing_hybrid",
        {
            **_LINEAR,
            "architectures": ["BailingMoeV3ForCausalLM"],
            "head_dim": 32,
            "moe_shared_expert_intermediate_size": 64,
        },
        [unstacked(), latent_heads, convolutions],
    ),
    "dbrx": (
        "dbrx",
        {
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        },
        [whole_experts],
    ),
    "deepseek": ("deepseek", {}, [unstacked()]),
    "deepseek_v41": ("deepseek_v41", {}, _DEEPSEEK_V41_UNDO),
    "hunyuan": ("hunyuan", _HUNYUAN, [unstacked()]),
    "kimi_k25": (
        "kimi_k25",
        {
            "text_config": {
                **_DEEPSEEK,
                "q_lora_rank": 64,
                "model_type": "deepseek_v3",
                "n_group": 1,
                "topk_group": 1,
                "routed_scaling_factor": 1.0,
                "rope_theta": 1e4,
            }
        },
        [unstacked(), latent_heads],
    ),
    "kimi_k3": ("kimi_k3", {"text_config": _KIMI_K3}, _KIMI_K3_UNDO),
    "kimi_linear": ("kimi_linear", _KIMI_LINEAR, _KIMI_LINEAR_UNDO),
    "kimi_vl": ("kimi_vl", {"text_config": {**_DEEPSEEK, "q_lora_rank": None}}, [unstacked()]),
    "Klear": (
        "Klear",
        {
            **PLAIN,
            "attention_bias": False,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
        [unstacked("experts")],
    ),
    "longcat_flash": (
        "longcat_flash",
        {**_LONGCAT, "attention_method": "MLA", "zero_expert_type": "identity"},
        [
            unstacked(),
            latent_heads,
        ],
    ),
    "longcat_flash_ngram": (
        "longcat_flash_ngram",
        {**_LONGCAT, "emb_neighbor_num": 2, "emb_split_num": 2, "ngram_vocab_size_ratio": 2},
        [
            unstacked(),
            latent_heads,
            renamed(r"model\.ngram_embeddings\.word_embeddings", "model.embed_tokens"),
        ],
    ),
    "mimo_v2_flash": ("mimo_v2_flash", _MIMO_V2, [unstacked()]),
    "minimax": (
        "minimax",
        {**PLAIN, "shared_intermediate_size": 0, "rotary_dim": 16},
        [unstacked(names=_MIXTRAL)],
    ),
    "phixtral": (
        "phixtral",
        {"num_vocab": 320, "model_dim": 128, "num_heads": 4, "num_layers": 2, "rotary_dim": 16},
        [
            unstacked("switch_mlp", "mlp"),
        ],
    ),
    "qwen3_5_moe": ("qwen3_5_moe", {"text_config": _QWEN35_MOE}, _QWEN35_UNDO),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {"text_config": _QWEN3_VL_MOE},
        [
            joined(
                ("switch_mlp.gate_proj", "switch_mlp.up_proj"),
                "experts.gate_up_proj",
                axis=1,
                weight="",
            ),
            renamed(r"switch_mlp\.down_proj\.weight", "experts.down_proj"),
            transposed(r"experts\.(gate_up|down)_proj$"),
            renamed(r"^language_model\.model\.", "model.language_model."),
            renamed(r"^language_model\.lm_head", "lm_head"),
        ],
    ),
    "qwen3_next, tied": ("qwen3_next", _QWEN3_NEXT, _QWEN3_NEXT_UNDO),
    "step3p5": (
        "step3p5",
        {
            "num_attention_groups": 2,
            "share_expert_dim": 64,
            "moe_layers_enum": "1",
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
        _STEP_UNDO,
    ),
}
"""Recipes whose ``sanitize`` moves weights only, by the name of the row."""

CHANGING: dict[str, Recipe] = {
    "bailing_moe, norm_head": (
        "bailing_moe",
        {**_BAILING, "norm_head": True},
        [unstacked(), _GATE],
    ),
}
"""Recipes whose ``sanitize`` computes other values."""
