"""mlx-lm: which models it loads, and which quantized weights its networks hold as values.

Pure, from tables; mlx_lm is not imported, which would take 2 s.

Source: mlx-lm 0.32.2. `MODULES` are the modules of mlx_lm/models that have a ``Model`` and its
``ModelArgs``; `REMAPPED` and `REMAPPED_ARCHITECTURES` are ``MODEL_REMAPPING`` and
``MODEL_ARCHITECTURE_REMAPPING`` of mlx_lm/utils.py. tests/unit/model/test_mlx_lm_table.py compares
them with the installed mlx-lm, and prints them anew where they differ.

A network holds the codes of a weight if its module can be quantized, and if loading only moves
whole groups of them. The tables list the rest, by module of mlx_lm/models. Source: mlx-lm 0.32.2,
the `sanitize` and the layers of each module. tests/architectures compares them with the networks
that the installed mlx-lm builds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from blobstore.model.facts import Layout, ModelFacts, Runs, TensorFacts, Verdict, are_alike

_LATENT = r"kv_b_proj\.weight"
"""Multi-head latent attention: `sanitize` splits it by head (``embed_q``, ``unembed_out``).

One half is transposed.
"""
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
"""Weights that become one, by their common prefix.

Its module holds the codes of one type, without a global scale.
"""

_MULTIPLIED = (
    r"(?:embed_tokens|lm_head|q_proj|k_proj|o_proj|out_proj|gate_proj|down_proj|in_proj)\.weight"
)
"""Weights of Falcon-H1 that are multiplied, row by row: affine codes stay under other scales."""
_CONVOLUTION = "model.layers.0.mamba.conv1d.weight"

_EMBEDDING = r"(?:(?!embed_out\.)[a-z_]*embed[a-z_]*|embedders\.[0-9]+|wte|wpe)\.weight"
"""Tables, and the halves of latent attention: their modules can't multiply by a global scale.

``embed_out`` is a head.
"""


def dequantized(model: ModelFacts, module: str) -> list[str]:
    """Return the sorted names of the quantized tensors that a network holds as values.

    ``module`` is the network's. Tensors that the network does not use, such as those of a vision
    tower, may be among them.
    """
    held = {
        tensor.name
        for tensor in (*_named(model, module), *_unlike(model, module))
        if tensor.quantization is not None
    }
    return sorted(held)


def _named(model: ModelFacts, module: str) -> Iterator[TensorFacts]:
    """Yield the tensors that the tables name, each with the types that they name it for."""
    head = r"lm_head\.weight"
    always = _ending(head if _normalizes_head(model, module) else ALWAYS.get(module))
    is_multiplied = module == "falcon_h1" and _is_published(model)
    multiplied = _ending(_MULTIPLIED if is_multiplied else None)
    scaled = _ending(_EMBEDDING)
    for tensor in model.tensors:
        if (
            always(tensor.name)
            or (tensor.double_scaled and scaled(tensor.name))
            or (multiplied(tensor.name) and not _is_affine(tensor))
        ):
            yield tensor


def _is_affine(tensor: TensorFacts) -> bool:
    return tensor.quantization is not None and tensor.quantization.quant_type.is_affine


def _ending(pattern: str | None) -> Callable[[str], object]:
    """Return a test of names for their end, which no name passes without a pattern."""
    if pattern is None:
        return lambda _: None
    return re.compile(rf"(?:.*\.)?(?:{pattern})", re.ASCII | re.DOTALL).fullmatch


def _normalizes_head(model: ModelFacts, module: str) -> bool:
    """Return True if loading divides the head by its norms.

    It does not for a Baichuan-M1 that mlx-lm itself quantized.
    """
    config = model.config or {}
    if module == "baichuan_m1":
        return not isinstance(config.get("quantization"), Mapping)
    return module in ("bailing_moe", "bailing_moe_linear") and config.get("norm_head") is True


def _is_published(model: ModelFacts) -> bool:
    """Return False for a Falcon-H1 that mlx-lm wrote; a convolution's axes show it."""
    shape = next((tensor.shape for tensor in model.tensors if tensor.name == _CONVOLUTION), None)
    return shape is None or len(shape) < 2 or shape[-1] > shape[1]  # noqa: PLR2004  # [out, in, width] as published


def _unlike(model: ModelFacts, module: str) -> Iterator[TensorFacts]:
    """Yield the tensors that become one parameter, whose codes can't be joined."""
    for group in model.experts:
        for experts in group.projections.values():
            if not are_alike(experts):
                yield from experts
    joined: dict[tuple[str, ...], list[TensorFacts]] = defaultdict(list)
    pattern = re.compile(JOINED.get(module, ""), re.ASCII | re.DOTALL)
    for tensor in model.tensors if module in JOINED else ():
        if match := pattern.fullmatch(tensor.name):
            joined[match.groups()].append(tensor)
    for parts in joined.values():
        if not are_alike(parts) or parts[0].double_scaled:
            yield from parts


NAME: Final = "mlx-lm"
VERSION: Final = "0.32.2"

MODULES: Final = frozenset(
    """
    Klear afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear
    bailing_moe_v3 bitnet cohere cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v41 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 gear gemma gemma2
    gemma3 gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2
    gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan
    hunyuan_v1_dense internlm2 internlm3 iquestloopcoder jamba kimi_k25 kimi_k3 kimi_linear kimi_vl
    laguna lfm2 lfm2-vl lfm2_moe lille-130m llama llama4 llama4_text longcat_flash
    longcat_flash_ngram mamba mamba2 mellum mimo mimo_v2_flash minicpm minicpm3 minimax
    minimax_m3_vl ministral3 mistral3 mistral4 mixtral muse_glimmer muse_spark nanbeige nanochat
    nemotron nemotron-nas nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3 phi3small
    phimoe phixtral pixtral plamo plamo2 plamo3 prism_hadamard_qwen35 qwen qwen2 qwen2_moe qwen2_vl
    qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma rwkv7
    seed_oss smollm3 solar_open spark2_5 stablelm starcoder2 step3p5 talkie telechat3 youtu_llm
    """.split()  # noqa: SIM905  # as a list it would be as long as the rest of the file
)
REMAPPED: Final = {
    "deepseek_v41_text": "deepseek_v41",
    "falcon_mamba": "mamba",
    "gemma4_unified": "gemma4",
    "iquestcoder": "llama",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "llava": "mistral3",
    "minimax_m2": "minimax",
    "mistral": "llama",
    "phi-msft": "phixtral",
    "qwen2_5_vl": "qwen2_vl",
    "xverse": "llama",
}
REMAPPED_ARCHITECTURES: Final = {("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"}

_PACKAGES: Final = {"olmo": "ai2-olmo"}
"""What a module imports that mlx-lm does not bring along (mlx_lm 0.32.2 models/olmo.py)."""

_TOKENIZER = ("tokenizer", "vocab")


def has_tokenizer(names: Iterable[str]) -> bool:
    """Return True if files of those names have a tokenizer among them."""
    return any(name.startswith(_TOKENIZER) for name in names)


def module_of(model: ModelFacts) -> str | None:
    """Return the module of mlx_lm/models that has a model's network; None for an unknown type."""
    return module_for(model.config or {})


def module_for(config: Mapping[str, Any]) -> str | None:
    """Return the module of mlx_lm/models that has the network of a config.json, as `module_of`.

    Source: mlx_lm/utils.py `_get_classes` at version 0.32.2.
    """
    model_type, named = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str):
        return None
    architectures = named if isinstance(named, list) else [named]
    own = (
        REMAPPED_ARCHITECTURES.get((model_type, one))
        for one in architectures
        if isinstance(one, str)
    )
    module = next(filter(None, own), None) or REMAPPED.get(model_type, model_type)
    return module if module in MODULES else None


def verdict(model: ModelFacts) -> Verdict:
    """Return the verdict of mlx-lm, if `blobstore.mlx_lm.load` loads the model."""
    module = module_of(model)
    if module is None:
        return Verdict(NAME, VERSION, Runs.NO, _why_unknown(model))
    if reason := next(_obstacles(model, module), None):
        return Verdict(NAME, VERSION, Runs.NO, reason)
    model_type = (model.config or {})["model_type"]
    if module in _PACKAGES:
        return Verdict(
            NAME, VERSION, Runs.UNKNOWN, f"{model_type} needs the package {_PACKAGES[module]}"
        )
    words = [model_type if model_type == module else f"{model_type} as {module}", model.types]
    if dequantized(model, module):
        words.append("partly dequantized")
    if model.has_other_senses:
        words.append("text only")
    if model.draft is not None:
        words.append("without its draft")
    if any(tensor.double_scaled for tensor in model.tensors):
        words.append("not from an exported folder, because of its global scales")
    return Verdict(NAME, VERSION, Runs.YES, ", ".join(words))


def _why_unknown(model: ModelFacts) -> str:
    if model.config is None:
        return "config.json is missing"
    model_type = model.config.get("model_type")
    is_named = isinstance(model_type, str)
    return f"it has no model type {model_type}" if is_named else "config.json has no model_type"


def _obstacles(model: ModelFacts, module: str) -> Iterator[str]:
    if not has_tokenizer(model.documents):
        yield "there is no tokenizer"
    for tensor in model.tensors:
        if not tensor.fits_mlx:
            yield f"MLX has no {tensor.dtype} arrays like {tensor.name}"
    yield from _missing(model, module)


def _missing(model: ModelFacts, module: str) -> Iterator[str]:
    """Yield requirements of networks that checkpoints of other programs do not meet.

    Sources: `sanitize` of mlx_lm 0.32.2 models/gpt_oss.py, which names experts ``.weight`` only
    where they are quantized; models/bitlinear_layers.py `BitLinear`.
    """
    fused = [group for group in model.experts if group.layout is Layout.FUSED]
    for group in fused if module == "gpt_oss" else ():
        plain = next((one.name for one in group.tensors if one.quantization is None), None)
        if plain is not None:
            yield (
                "it reads experts of gate and up in one tensor only when they are quantized, and"
                f" {plain} is not"
            )
        hidden, tensor = (
            (model.config or {}).get("hidden_size"),
            group.projections["gate_up_proj"][0],
        )
        if type(hidden) is int and tensor.shape[-1] != hidden:
            yield f"{tensor.name} is quantized along its outputs, as Ollama's importer does"
    has_scales = any(tensor.name.endswith(".weight_scale") for tensor in model.tensors)
    if module == "bitnet" and not has_scales:
        yield "it reads BitNet's weights only when they are packed, with a weight_scale each"
