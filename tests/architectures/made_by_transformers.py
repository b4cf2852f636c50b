"""Checkpoints of a few layers that transformers writes from its own models.

What a configuration has by one of the names of `TINY` gets that value, in nested configurations
too; a recipe says the rest.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]

_BY_VALUE = {
    1: """n_group topk_group num_expert_group bos_token_id eos_token_id pad_token_id
        first_k_dense_replace n_shared_experts num_shared_experts""",
    2: """num_hidden_layers n_layers n_layer num_layers depth num_experts_per_tok
        num_experts_per_token moe_topk moe_top_k moe_k top_k_experts linear_num_key_heads
        index_n_heads num_key_value_heads""",
    4: """num_attention_heads n_heads n_head num_heads num_experts num_local_experts
        n_routed_experts moe_num_experts linear_num_value_heads linear_num_heads
        linear_conv_kernel_dim""",
    8: "index_topk",
    16: "sliding_window",
    32: "qk_rope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim head_dim",
    64: """moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size
        moe_shared_expert_intermediate_size shared_intermediate_size moe_hidden_size kv_lora_rank
        q_lora_rank qk_nope_head_dim v_head_dim index_head_dim""",
    128: "hidden_size d_model n_embd",
    256: """intermediate_size ffn_hidden_size intermediate_size_mlp dense_intermediate_size
        max_position_embeddings n_positions max_seq_len model_max_length""",
    320: "vocab_size",
    0: "num_nextn_predict_layers",
}
TINY = {name: value for value, names in _BY_VALUE.items() for name in names.split()}
_TOWER = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "depth": 1}
_TOWER |= {"num_heads": 2, "num_attention_heads": 2}
_TOWERS = ("vision_config", "audio_config")


def make(folder: Path, model_type: str, overrides: Json, also: Json) -> None:
    """Write a checkpoint of ``model_type`` into ``folder``.

    The same weights for the same arguments.

    ``also``: what the config.json of published checkpoints has and that of transformers 5 has not.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    cls = CONFIG_MAPPING[model_type]
    config = cls(**_arguments(cls, overrides, TINY))
    torch.manual_seed(0)
    auto: Any = (
        AutoModelForImageTextToText
        if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        else AutoModelForCausalLM
    )
    model = auto.from_config(config, dtype=torch.bfloat16)
    _fill(model, torch.Generator().manual_seed(zlib.crc32(model_type.encode())))
    model.save_pretrained(folder)
    path = folder / "config.json"
    document = json.loads(path.read_text())
    _add_old_names(document, config)
    path.write_text(json.dumps(merged(document, also), indent=2))


def _arguments(cls: Any, overrides: Json, tiny: dict[str, Any]) -> dict[str, Any]:
    default = cls()
    known = vars(default).keys() - default.sub_configs.keys()
    own = {key: value for key, value in tiny.items() if key in known}
    for key in default.sub_configs:
        part = getattr(default, key, None)
        if part is None or overrides.get(key, {}) is None:
            continue
        inner = tiny | _TOWER if key in _TOWERS else tiny
        values = _arguments(type(part), overrides.get(key, {}), inner)
        own[key] = {"model_type": part.model_type, **values}
    parts = own.keys() & default.sub_configs.keys()
    return {**own, **{key: value for key, value in overrides.items() if key not in parts}}


def _add_old_names(document: dict[str, Any], config: Any) -> None:
    """Add what transformers 4 wrote, as nearly all published checkpoints have it."""
    for key in config.sub_configs:
        if isinstance(document.get(key), dict):
            _add_old_names(document[key], getattr(config, key))
    old = {name: document[new] for name, new in config.attribute_map.items() if new in document}
    rope = document.get("rope_parameters") or {}
    if "rope_theta" in rope:
        old |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        old["rope_scaling"] = None
        if (tied := getattr(config, "tie_word_embeddings", None)) is not None:
            old["tie_word_embeddings"] = tied
    for key, value in old.items():
        document.setdefault(key, value)


def merged(document: Json, patch: Json) -> dict[str, Any]:
    """Return ``document`` with a JSON merge patch (RFC 7396)."""
    result = dict(document)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            nested = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if nested else value
    return result


def _fill(model: Any, generator: Any) -> None:
    """Give every matrix normal values; add some to vectors, whose initial values mean something."""
    import torch

    with torch.no_grad():
        for name, value in sorted(model.state_dict(keep_vars=True).items()):
            if not value.is_floating_point():
                continue
            noise = torch.randn(value.shape, generator=generator)
            if value.ndim == 1 or "A_log" in name or name.endswith((".D", ".dt_bias")):
                noise = value.float() + 0.05 * noise
            else:
                noise *= 0.1 if value.ndim != 2 and "conv" in name else 0.05
            value.copy_(noise)
