"""mlx-lm: which quantized weights its networks hold as values, as tables and a function. Pure.

A network holds the codes of a weight if its module can be quantized, and if loading only moves whole groups of them. The
tables list the rest, by module of mlx_lm/models. Source: mlx-lm 0.32.2, the `sanitize` and the layers of each module.
tests/architectures compares them with the networks that the installed mlx-lm builds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from blobstore.runtimes.facts import ModelFacts, TensorFacts, are_alike

_NOTHING = r"(?!)"
"""What no name is like."""
_LATENT = r"kv_b_proj\.weight"
"""Multi-head latent attention: `sanitize` splits it by head and transposes one half (``embed_q``, ``unembed_out``)."""
_GATE = r"mlp\.gate\.weight"
"""A router's weight that is an array of its layer, not a linear layer."""
_DECAY = r"A_log"

ALWAYS: Final[Mapping[str, str]] = {
    "afm7": r"qkv_proj\.weight",  # its FusedLinear can't be quantized in a mode
    "bailing_hybrid": _LATENT,
    "bailing_moe_v3": f"{_LATENT}|{_GATE}",
    "deepseek": _GATE,
    "deepseek_v2": _GATE,
    "deepseek_v3": f"{_LATENT}|{_GATE}",
    "deepseek_v32": f"{_LATENT}|{_GATE}",
    "deepseek_v41": r"(?:ffn|mlp)\.gate\.weight|hc_(?:attn|ffn)_fn|(?:attn|ffn)_hc\.fn",
    "dots1": _GATE,
    "exaone_moe": _GATE,
    "glm4_moe": _GATE,
    "glm4_moe_lite": f"{_LATENT}|{_GATE}",
    "glm_moe_dsa": f"{_LATENT}|{_GATE}",
    "iquestloopcoder": r"gate_projections\.[0-9]+\.weight",
    "jamba": _DECAY,
    "kimi_k25": f"{_LATENT}|{_GATE}",
    "kimi_k3": _LATENT,
    "kimi_linear": _LATENT,
    "kimi_vl": _GATE,
    "longcat_flash": _LATENT,
    "longcat_flash_ngram": _LATENT,
    "mamba": _DECAY,
    "mimo_v2_flash": _GATE,
    "mistral4": _LATENT,
    "muse_spark": _GATE,
    "nemotron_h": r"mixer\.gate\.weight",
    "phixtral": r"switch_mlp\.fc[12]\.bias",
    "plamo2": r"mixer\.[qk]_weight",
    "recurrent_gemma": r"rg_lru\.\w+_gate_(?:weight|bias)",
    "rwkv7": r"attn\.(?:x_[a-z]|[rk]_k|k_a|g_norm\.(?:weight|bias))",
    "solar_open": _GATE,
    "talkie": r"lm_head",
}
"""Weights that are values in every type: the end of their names, from a dot on."""

JOINED: Final[Mapping[str, str]] = {
    "kimi_k3": r"(.*\.self_attn)\.[qkv]_proj\.weight",
    "muse_spark": r"(.*\.(?:self_attn|attn))\.(?:[qkv]|gate)_proj\.weight",
}
"""Weights that become one, by their common prefix. Its module holds the codes of one type, without a global scale."""

_MULTIPLIED = r"(?:embed_tokens|lm_head|q_proj|k_proj|o_proj|out_proj|gate_proj|down_proj|in_proj)\.weight"
"""Weights of Falcon-H1 that are multiplied, row by row: affine codes stay under other scales."""
_CONVOLUTION = "model.layers.0.mamba.conv1d.weight"

_EMBEDDING = r"(?:(?!embed_out\.)[a-z_]*embed[a-z_]*|embedders\.[0-9]+|wte|wpe)\.weight"
"""Tables, and the halves of latent attention: their modules can't multiply by a global scale. ``embed_out`` is a head."""


def dequantized(model: ModelFacts, module: str) -> list[str]:
    """Return the names of the quantized tensors that the network of ``module`` holds as values, sorted.

    Tensors that the network does not use, such as those of a vision tower, may be among them.
    """
    held = {tensor.name for tensor in (*_named(model, module), *_unlike(model, module)) if tensor.quantization is not None}
    return sorted(held)


def _named(model: ModelFacts, module: str) -> Iterator[TensorFacts]:
    """Yield the tensors that the tables name, each with the types that they name it for."""
    always, scaled = _ending(_always(model, module)), _ending(_EMBEDDING)
    multiplied = _ending(_MULTIPLIED if module == "falcon_h1" and _is_published(model) else _NOTHING)
    for tensor in model.tensors:
        is_affine = tensor.quantization is not None and tensor.quantization.quant_type.is_affine
        if (
            always.fullmatch(tensor.name)
            or (tensor.double_scaled and scaled.fullmatch(tensor.name))
            or (not is_affine and multiplied.fullmatch(tensor.name))
        ):
            yield tensor


def _ending(pattern: str) -> re.Pattern[str]:
    """Return a pattern of the names that end so, from a dot on."""
    return re.compile(rf"(?:.*\.)?(?:{pattern})", re.ASCII | re.DOTALL)


def _always(model: ModelFacts, module: str) -> str:
    return r"lm_head\.weight" if _normalizes_head(model, module) else ALWAYS.get(module, _NOTHING)


def _normalizes_head(model: ModelFacts, module: str) -> bool:
    """Return True if loading divides the head by its norms; Baichuan-M1's not when mlx-lm itself quantized it."""
    config = model.config or {}
    if module == "baichuan_m1":
        return not isinstance(config.get("quantization"), Mapping)
    return module in ("bailing_moe", "bailing_moe_linear") and config.get("norm_head") is True


def _is_published(model: ModelFacts) -> bool:
    """Return True unless a Falcon-H1 was written by mlx-lm, which tells its own by the axes of a convolution."""
    shape = next((tensor.shape for tensor in model.tensors if tensor.name == _CONVOLUTION), None)
    return shape is None or len(shape) < 2 or shape[-1] > shape[1]  # noqa: PLR2004  # [out, in, width] as published


def _unlike(model: ModelFacts, module: str) -> Iterator[TensorFacts]:
    """Yield the tensors that become one parameter, whose codes can't be joined."""
    for group in model.experts:
        for experts in group.projections.values():
            if not are_alike(experts):
                yield from experts
    joined: dict[tuple[str, ...], list[TensorFacts]] = defaultdict(list)
    pattern = re.compile(JOINED.get(module, _NOTHING), re.ASCII | re.DOTALL)
    for tensor in model.tensors:
        if match := pattern.fullmatch(tensor.name):
            joined[match.groups()].append(tensor)
    for parts in joined.values():
        if not are_alike(parts) or parts[0].double_scaled:
            yield from parts
