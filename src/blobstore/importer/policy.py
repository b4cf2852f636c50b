"""Policies: which type each output tensor gets, by its name and shape. Pure.

The general policy is that of docs/formats.md section 6. Rules decide otherwise for the tensors of
some architectures; they hold in both profiles. A policy sees output tensors: stacked experts have
rank 3 already.

Source of the facts: ollama/ollama@fb307609 x/create/create.go `GetTensorQuantization`,
x/create/quantpolicy.go, and the recorded plans in fixtures/ollama-records. Tensors that no record
has (Laguna, Glimmer, drafts) follow x/create of July and August 2026, in versions that give the
recorded plans: create.go `tensorImportTransformRegistry` names the architectures, quantpolicy.go
has what they share, and each rule below names its file.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from blobstore.errors import DocumentError, quoted
from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.dtypes import Quantization, QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.roles import (
    HEAD,
    MATRIX,
    MIN_ELEMENTS,
    SENSITIVE,
    STACK,
    ModelRoles,
    Roles,
    contains,
    embeds_tokens,
    layer_of,
)

Types = tuple[QuantType, ...]
KEEP: Types = ()
TypesOf = Callable[[str, QuantType], Types | None]
"""Decides of a tensor by its name and the asked type: types to try in turn, of which the first
whose groups divide the rows is taken; `KEEP`; or None, to leave it to other rules."""


_BY_ARCHITECTURE = "is kept by its architecture's policy"


@dataclass(frozen=True, slots=True)
class Policy:
    """Decides the quantization of output tensors, for one asked type.

    ``rules``: of the architecture, each with the reason for what it keeps. The first one that
    decides about a tensor counts, else the general policy. A packed group of experts gets one type:
    there only `wants` is asked, so a tensor that a policy keeps is kept, and one that it would
    promote gets the asked type. What a rule decides holds for weight matrices and stacks of experts
    of at least 1024 elements, as in the general policy. Ollama asks neither there: it would
    quantize smaller ones, and try to with a bias whose name contains ``.v_proj``.
    """

    asked: QuantType
    options: ImportOptions
    roles: Roles = field(default_factory=Roles)
    rules: Sequence[tuple[TypesOf, str]] = ()

    def types(self, name: str, shape: tuple[int, ...]) -> tuple[Types, str]:
        """Return the types to try in turn, of which the first one that fits the rows is taken.

        In general that is the asked type, or 8 bits for the head and the sensitive projections.
        With ``pure`` it is the asked type for all of these, and for embeddings of tokens.
        `KEEP` comes with the reason, the end of a sentence that begins with the tensor's name: in
        general it is not a weight matrix, or an embedding, norm, gate or part of another modality's
        tower.
        """
        decisions = ((types_of(name, self.asked), why) for types_of, why in self.rules)
        types, why = next(
            (decision for decision in decisions if decision[0] is not None), (None, "")
        )
        if types == KEEP:
            return KEEP, why
        if self.options.pure and (types or self._embeds(name, shape)):
            types = (self.asked,)
        if types is None and (role := self.roles.kept_as(name, shape)) is not None:
            return KEEP, f"is {role}"
        if (unfit := self._unfit(name, shape)) is not None:
            return KEEP, unfit
        if types is None:
            is_mixed = not self.options.pure
            base = self.asked.eight_bit if is_mixed and name.endswith(HEAD) else self.asked
            promotes = is_mixed and self.options.fits(base, shape) and self._promotes(name, shape)
            types = (base.eight_bit, base) if promotes else (base,)
        return types, ""

    def wants(self, name: str, shape: tuple[int, ...]) -> bool:
        return self.types(name, shape)[0] != KEEP

    def quantization(self, name: str, shape: tuple[int, ...]) -> Quantization | None:
        types, _ = self.types(name, shape)
        fitting = (kind for kind in types if self.options.fits(kind, shape))
        return next((self.options.quantization(kind) for kind in fitting), None)

    def reason(self, name: str, shape: tuple[int, ...]) -> str:
        types, why = self.types(name, shape)
        return self.options.misfit(types[-1], shape) if types else why

    def _unfit(self, name: str, shape: tuple[int, ...]) -> str | None:
        expert = self.roles.is_expert(name, shape)
        if not (expert or name.endswith(".weight")):
            return "is not called a weight"
        if math.prod(shape) < MIN_ELEMENTS:
            return f"has fewer than {MIN_ELEMENTS:,} weights"
        if len(shape) == MATRIX or (len(shape) == STACK and expert):
            return None
        if len(shape) < MATRIX:
            return "is not a matrix"
        return f"has {len(shape)} dimensions and is not known as a stack of experts"

    def _embeds(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True for a table of tokens that mlx-lm runs quantized: without a global scale."""
        return embeds_tokens(name, shape) and not self.options.global_scale

    def _promotes(self, name: str, shape: tuple[int, ...]) -> bool:
        if not contains(name, SENSITIVE):
            return False
        return self.asked is QuantType.INT4 or (
            self.asked.bits == 4 and not self.roles.is_expert(name, shape)  # noqa: PLR2004
        )


_FOUR_BITS = frozenset(kind for kind in QuantType if kind is not kind.eight_bit)
_FP4 = frozenset({QuantType.NVFP4, QuantType.MXFP4})
_TOKENS = r"^(?!.*per_layer).*embed_tokens\.weight\Z"
_LAYER = r"^(?=.*\.layers\.[0-9]{1,18}\.)"
_TEXT = r"^(?!.*(?:vision|visual|audio_tower|embed_audio))"


class _Row(NamedTuple):
    """A row of an architecture's policy: a pattern that is searched in names, and what they get.

    "by layer" is 8 bits at some layers (`_more_bits`), else the asked type. ``asked``: the asked
    types that the row is for.
    """

    names: str
    gets: Literal["nothing", "asked", "8", "8 or asked", "by layer"]
    asked: Collection[QuantType] = tuple(QuantType)


def _table(layers: int, *rows: _Row) -> TypesOf:
    """Return the rule that the first row decides whose pattern is in the name."""
    patterns = [(re.compile(row.names, re.DOTALL), row) for row in rows]

    def types(name: str, asked: QuantType) -> Types | None:
        rows = (row for names, row in patterns if asked in row.asked and names.search(name))
        if (row := next(rows, None)) is None:
            return None
        if row.gets in ("nothing", "8"):
            return KEEP if row.gets == "nothing" else (asked.eight_bit,)
        by_layer = row.gets == "by layer" and _more_bits(layer_of(name), layers)
        return (asked.eight_bit, asked) if by_layer or row.gets == "8 or asked" else (asked,)

    return types


# Qwen3.5 and Qwen3-Next: the low-rank projections of linear attention are kept (qwen35.go).
_qwen35 = _table(0, _Row(r"\.linear_attn\.in_proj_(?:a|b|ba)\.weight\Z", "nothing"))
# Draft models: the asked type for embedding and head, without promotion (draft.go). The quality of
# a draft only changes how many of its tokens are taken, and it reads its head for each of them.
_draft = _table(0, _Row(_TOKENS, "asked"), _Row(r"lm_head\.weight\Z", "asked"))


def _gemma4(config: SourceConfig) -> TypesOf:
    """Gemma 4: 8 bits for the embedding, and at some layers for v and down (gemma4.go).

    The embedding is the head too. k gets them only in a mixture of 8 experts, which has few key-
    value heads: there k and v do at every layer. That holds for stacked experts' down projections
    too, whatever the type. (A change that takes those out for more than 8 experts,
    ollama/ollama#17976, was proposed on 24 August 2026 and is not followed.)
    """
    layers = _count(config, "num_hidden_layers", config.text_config)
    few_heads = layers > 0 and _count(config, "num_experts", config.text_config) == 8  # noqa: PLR2004  # see above
    return _table(
        layers,
        _Row(_TOKENS, "8 or asked"),
        _Row(rf"{_TEXT}.*\.k_proj", "8 or asked" if few_heads else "asked", _FOUR_BITS),
        _Row(rf"{_TEXT}.*\.v_proj", "8 or asked" if few_heads else "by layer", _FOUR_BITS),
        _Row(rf"{_TEXT}.*down_proj", "by layer", _FOUR_BITS),
    )


def _cohere2moe(config: SourceConfig) -> TypesOf:
    """Cohere2 MoE: 8 bits for the embedding, and at some layers for k, v and down (cohere2moe.go).

    The embedding is the head too. Experts' down projections are among them, whatever the type: 8
    bits at every layer cost a quarter of decoding's speed.
    """
    layers = _count(config, "num_hidden_layers")
    sensitive = _Row(rf"{_LAYER}.*(?:\.[vk]_proj|down_proj)", "by layer", _FOUR_BITS)
    return _table(layers, _Row(_TOKENS, "8"), *([sensitive] if layers else []))


def _nemotron_h(config: SourceConfig) -> TypesOf:
    """Nemotron-H: 8 bits for embedding and head (nemotron_h.go).

    The fp4 types give 8 bits to attention too, and at some layers to outputs. Convolutions and
    gates are kept, and the other modalities' tensors. int4 promotes as in general.
    """
    outputs = (
        r"(?:.*\.mixer\.(?:shared_experts\.down|down|out)_proj"
        r"|(?=.*\.mixer\.experts\.).*\.down_proj)\.weight\Z"
    )
    return _table(
        _count(config, "num_hidden_layers", config.others.get("llm_config")),
        _Row(r"^(?:vision_model|mlp1|sound_encoder|sound_projection)\.", "nothing"),
        _Row(r"\.mixer\.(?:gate|conv1d)\.weight\Z", "nothing"),
        _Row(r"(?:embeddings|lm_head)\.weight\Z", "8"),
        _Row(r"\.mixer\.[qkvo]_proj\.weight\Z", "8 or asked", _FP4),
        _Row(_LAYER + outputs, "by layer", _FP4),
        _Row("^" + outputs, "8 or asked", _FP4),
    )


def _glimmer(config: SourceConfig) -> TypesOf:
    """Glimmer: 8 bits for embedding, attention, at some layers gates and down (glimmer.go)."""
    by_layer = r"\.self_attn\.(?:output_)?gate_proj|\.mlp\.down_proj"
    return _table(
        _count(config, "num_hidden_layers", config.text_config),
        _Row("vision|visual", "nothing"),
        _Row(_TOKENS, "8 or asked"),
        _Row(r"\.self_attn\.[qokv]_proj", "8 or asked", _FOUR_BITS),
        _Row(by_layer, "by layer", _FOUR_BITS),
    )


def _laguna(config: SourceConfig) -> TypesOf:
    """Laguna: a list of what nvfp4, mxfp4 and mxfp8 quantize; everything else is kept (laguna.go).

    8 bits for embedding and head; the asked type for attention (which mxfp8 keeps), the dense
    layers and the experts. The down projections of some layers get more: of shared experts 8 bits
    (mxfp8 keeps them all), of routed ones mxfp8 keeps them. int4 and int8 follow the general
    policy. Earlier versions (ollama/ollama#17237, July 2026) keep embedding and head.
    """
    kinds = _list(config, "mlp_layer_types", str)
    dense = {layer for layer, kind in enumerate(kinds) if kind == "dense"}
    dense.update(_list(config, "mlp_only_layers", int))
    # Laguna XS has 40 layers, and its first is dense.
    layers = _count(config, "num_hidden_layers") or len(kinds) or 40
    dense = dense or {0}
    attention = tuple(f".self_attn.{part}_proj.weight" for part in "qkvog")
    projections = tuple(f".{part}_proj.weight" for part in ("gate", "up", "down"))

    def types(name: str, asked: QuantType) -> Types | None:
        if asked.is_affine:
            return None
        if re.search(_TOKENS, name, re.DOTALL) or name.endswith(HEAD):
            return (asked.eight_bit,)
        if contains(name, attention):
            return KEEP if asked is QuantType.MXFP8 else (asked,)
        if contains(name, tuple(f".mlp{projection}" for projection in projections)):
            return (asked,) if layer_of(name) in dense else KEEP
        return of_experts(name, asked)

    def of_experts(name: str, asked: QuantType) -> Types:
        routed, shared = ".mlp.experts." in name, ".mlp.shared_expert." in name
        if not (routed or shared) or not name.endswith(projections):
            return KEEP
        if not name.endswith(".down_proj.weight"):
            return (asked,)
        sensitive = _more_bits(layer_of(name), layers, middle_end=layers // 2 - 4)
        if asked is QuantType.MXFP8:
            return KEEP if shared or sensitive else (asked,)
        return (asked.eight_bit, asked) if shared and sensitive else (asked,)

    return types


_TASKS = ("CausalLM", "ConditionalGeneration")

# By the whole name, as in Ollama: an architecture that is not here has the general policy, whatever
# its name resembles.
_RULES: dict[str, Callable[[SourceConfig], TypesOf]] = {
    **dict.fromkeys(
        [
            f"{family}For{task}"
            for family in ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next", "Qwen3NextMoe")
            for task in _TASKS
        ],
        lambda _: _qwen35,
    ),
    **dict.fromkeys(
        [
            *(f"{family}For{task}" for family in ("Gemma4", "Gemma4Unified") for task in _TASKS),
            *("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
            *("gemma4_unified", "gemma4_unified_text", "gemma4_unified_assistant"),
        ],
        _gemma4,
    ),
    **dict.fromkeys(
        ["NemotronHForCausalLM", "NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3"],
        _nemotron_h,
    ),
    "Cohere2MoeForCausalLM": _cohere2moe,
    "LagunaForCausalLM": _laguna,
    "MuseGlimmerForConditionalGeneration": _glimmer,
}

# mlx-lm divides the head of these models by its norms as it loads it.
#
# It would take codes for values, so the head is kept. Source: mlx_lm 0.32.2 models/bailing_moe.py,
# bailing_moe_linear.py (where ``norm_head`` is set), baichuan_m1.py, `sanitize`.
_NORMALIZED_HEAD = (
    _table(0, _Row(r"lm_head\.weight\Z", "nothing")),
    "is normalised by mlx-lm as it is loaded",
)


def policy_for(
    config: SourceConfig | None, asked: QuantType, options: ImportOptions, *, is_draft: bool = False
) -> Policy:
    """Return the policy for a checkpoint, by its config.json; without one, the general policy.

    A draft model has its architecture's own, but for embedding and head. It is asked with names
    without the prefix ``draft.``, because rules look for whole beginnings of names, and gets the
    draft's ``options``.

    Raises: DocumentError (rule Q1) when the number of layers or experts, or a list of layers, which
    the architecture's rule needs, is invalid.
    """
    rules: list[tuple[TypesOf, str]] = [(_draft, _BY_ARCHITECTURE)] if is_draft else []
    if config is not None:
        if (make_rule := _RULES.get(config.architecture)) is not None:
            rules.append((make_rule(config), _BY_ARCHITECTURE))
        if not options.profile.is_ollama and _normalizes_head(config):
            rules.append(_NORMALIZED_HEAD)
    return Policy(
        asked, options, Roles() if options.profile.is_ollama else ModelRoles.of(config), rules
    )


def _normalizes_head(config: SourceConfig) -> bool:
    if config.model_type in ("bailing_moe", "bailing_moe_linear"):
        return config.others.get("norm_head") is True
    return config.model_type == "baichuan_m1"


def _more_bits(layer: int | None, layers: int, middle_end: int | None = None) -> bool:
    """Return True for the first and last eighth of the layers, and for every third between."""
    if layer is None or not layers:
        return False
    first, last = layers // 8, 7 * layers // 8
    between = layer < (last if middle_end is None else middle_end)
    return layer < first or layer >= last or (between and (layer - first) % 3 == 2)  # noqa: PLR2004


def _invalid(what: str) -> DocumentError:
    return DocumentError(f"config.json: {what} (rule Q1)", rule="Q1")


def _list(config: SourceConfig, key: str, kind: type) -> list[Any]:
    value = config.others.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise _invalid(f"{key} is not a list of {kind.__name__}")
    return value


def _count(config: SourceConfig, key: str, section: object = None) -> int:
    """Return the first number of that key in config.json or a section that is not 0, else 0."""
    inner = section if isinstance(section, dict) else {}
    for value in (config.others.get(key), inner.get(key)):
        if value is not None and (type(value) is not int or value < 0):
            raise _invalid(f"{key} is {quoted(value)}, not a whole number")
        if value:
            return value
    return 0
