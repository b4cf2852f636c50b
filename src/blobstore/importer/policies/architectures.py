"""Policies by architecture: what Ollama decides otherwise than in its general policy, as data and small functions. Pure.

Source of the facts: the plans in fixtures/ollama-records (ollama/ollama@fb307609); and, for what no
record reaches (Laguna, Glimmer, drafts, other numbers of layers and experts), Ollama's x/create as
published in July and August 2026, in versions that give the recorded plans: create.go
`tensorImportTransformRegistry` names the architectures, quantpolicy.go has what they share, and
each rule below names its file.

The rules hold in both profiles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blobstore.errors import DocumentError, quoted
from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.quant import QuantType
from blobstore.importer.policies.options import ImportOptions
from blobstore.importer.policies.policy import (
    KEEP,
    ArchitectureRule,
    GeneralPolicy,
    NormalizedHead,
    Policy,
    RulePolicy,
    Types,
)
from blobstore.importer.policies.roles import roles_for

_LAYER = re.compile(r"\.layers\.([0-9]{1,18})\.", re.ASCII)
_SENSITIVE = (".v_proj", ".k_proj", "down_proj")
_VISION = ("vision", "visual")
_AUDIO = ("audio_tower", "embed_audio")


@dataclass(frozen=True, slots=True)
class Qwen35:
    """Qwen3.5 and Qwen3-Next: the low-rank projections of linear attention are kept (qwen35.go)."""

    LOW_RANK = tuple(f".linear_attn.in_proj_{part}.weight" for part in ("a", "b", "ba"))

    def types(self, name: str, asked: QuantType) -> Types | None:  # noqa: ARG002  # the same for every type
        """See `Rule`."""
        return KEEP if name.endswith(self.LOW_RANK) else None


@dataclass(frozen=True, slots=True)
class Gemma4:
    """Gemma 4: 8 bits for the embedding, which is the head too, and at some layers for v and down (gemma4.go).

    k gets them only in a mixture of 8 experts, which has few key-value heads: there k and v do at
    every layer. That holds for stacked experts' down projections too, whatever the type. (A change
    that takes those out for more than 8 experts, ollama/ollama#17976, was proposed on 24 August
    2026 and is not followed.)
    """

    layers: int
    experts: int

    @classmethod
    def of(cls, config: SourceConfig) -> Gemma4:
        """Return the rule for a checkpoint.

        Raises: DocumentError (rule Q1) for an invalid number of layers.
        """
        sections = _text_sections(config)
        return cls(_count(sections, "num_hidden_layers"), _count(sections, "num_experts"))

    def types(self, name: str, asked: QuantType) -> Types | None:
        """See `Rule`."""
        if _is_embedding(name):
            return _eight_bits(asked)
        if (
            asked is asked.eight_bit
            or not _has(name, _SENSITIVE)
            or _has(name, (*_VISION, *_AUDIO))
        ):
            return None
        return _eight_bits(asked) if self._promotes(name) else (asked,)

    def _promotes(self, name: str) -> bool:
        if self.layers and self.experts == 8 and _has(name, (".v_proj", ".k_proj")):  # noqa: PLR2004  # see the class
            return True
        return ".k_proj" not in name and _more_bits(_layer(name), self.layers)


@dataclass(frozen=True, slots=True)
class Cohere2Moe:
    """Cohere2 MoE: 8 bits for the embedding, which is the head too, and at some layers for k, v and down (cohere2moe.go).

    Experts' down projections are among them, whatever the type: 8 bits at every layer cost a
    quarter of decoding's speed.
    """

    layers: int

    @classmethod
    def of(cls, config: SourceConfig) -> Cohere2Moe:
        """Return the rule for a checkpoint.

        Raises: DocumentError (rule Q1) for an invalid number of layers.
        """
        return cls(_count([_top(config)], "num_hidden_layers"))

    def types(self, name: str, asked: QuantType) -> Types | None:
        """See `Rule`."""
        if _is_embedding(name):
            return (asked.eight_bit,)
        layer = _layer(name)
        if (
            asked is asked.eight_bit
            or not _has(name, _SENSITIVE)
            or not self.layers
            or layer is None
        ):
            return None
        return _eight_bits(asked) if _more_bits(layer, self.layers) else (asked,)


@dataclass(frozen=True, slots=True)
class NemotronH:
    """Nemotron-H: 8 bits for embedding and head.

    Of the fp4 types, for attention and at some layers for outputs.

    Convolutions and gates are kept, and the other modalities' tensors (nemotron_h.go). int4
    promotes as in general.
    """

    layers: int

    OTHER_MODALITIES = ("vision_model.", "mlp1.", "sound_encoder.", "sound_projection.")
    KEPT = (".mixer.gate.weight", ".mixer.conv1d.weight")
    ENDS = ("embeddings.weight", "lm_head.weight")
    ATTENTION = tuple(f".mixer.{part}_proj.weight" for part in "qkvo")
    OUTPUTS = (
        ".mixer.out_proj.weight",
        ".mixer.down_proj.weight",
        ".mixer.shared_experts.down_proj.weight",
    )

    @classmethod
    def of(cls, config: SourceConfig) -> NemotronH:
        """Return the rule for a checkpoint.

        Raises: DocumentError (rule Q1) for an invalid number of layers.
        """
        return cls(_count([_top(config), _section(config.llm_config)], "num_hidden_layers"))

    def types(self, name: str, asked: QuantType) -> Types | None:
        """See `Rule`."""
        if name.startswith(self.OTHER_MODALITIES) or name.endswith(self.KEPT):
            return KEEP
        if name.endswith(self.ENDS):
            return (asked.eight_bit,)
        if asked not in (QuantType.NVFP4, QuantType.MXFP4):
            return None
        if name.endswith(self.ATTENTION):
            return _eight_bits(asked)
        if not name.endswith(self.OUTPUTS) and not (
            ".mixer.experts." in name and name.endswith(".down_proj.weight")
        ):
            return None
        layer = _layer(name)
        return _eight_bits(asked) if layer is None or _more_bits(layer, self.layers) else (asked,)


@dataclass(frozen=True, slots=True)
class Glimmer:
    """Glimmer: 8 bits for the embedding and attention, and at some layers for its gates and for down (glimmer.go)."""

    layers: int

    ATTENTION = tuple(f".self_attn.{part}_proj" for part in "qokv")
    BY_LAYER = (".self_attn.gate_proj", ".self_attn.output_gate_proj", ".mlp.down_proj")

    @classmethod
    def of(cls, config: SourceConfig) -> Glimmer:
        """Return the rule for a checkpoint.

        Raises: DocumentError (rule Q1) for an invalid number of layers.
        """
        return cls(_count(_text_sections(config), "num_hidden_layers"))

    def types(self, name: str, asked: QuantType) -> Types | None:
        """See `Rule`."""
        if _has(name, _VISION):
            return KEEP
        if _is_embedding(name):
            return _eight_bits(asked)
        if asked is asked.eight_bit:
            return None
        if _has(name, self.ATTENTION):
            return _eight_bits(asked)
        if not _has(name, self.BY_LAYER):
            return None
        return _eight_bits(asked) if _more_bits(_layer(name), self.layers) else (asked,)


@dataclass(frozen=True, slots=True)
class Laguna:
    """Laguna: a list of what nvfp4, mxfp4 and mxfp8 quantize; everything else is kept (laguna.go).

    8 bits for embedding and head; the asked type for attention (which mxfp8 keeps), the dense
    layers and the experts. The down projections of some layers get more: of shared experts 8 bits
    (mxfp8 keeps them all), of routed ones mxfp8 keeps them. int4 and int8 follow the general
    policy. Earlier versions (ollama/ollama#17237, July 2026) keep embedding and head.
    """

    layers: int
    dense: frozenset[int]

    ATTENTION = tuple(f".self_attn.{part}_proj.weight" for part in "qkvog")
    DENSE = tuple(f".mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
    PROJECTIONS = tuple(f".{part}_proj.weight" for part in ("gate", "up", "down"))

    @classmethod
    def of(cls, config: SourceConfig) -> Laguna:
        """Return the rule for a checkpoint.

        Raises: DocumentError (rule Q1) for invalid numbers or kinds of layers.
        """
        kinds = _list(config.mlp_layer_types, str, "mlp_layer_types")
        dense = {layer for layer, kind in enumerate(kinds) if kind == "dense"}
        dense |= set(_list(config.mlp_only_layers, int, "mlp_only_layers"))
        # Laguna XS has 40 layers, and its first is dense.
        return cls(
            _count([_top(config)], "num_hidden_layers") or len(kinds) or 40, frozenset(dense or {0})
        )

    def types(self, name: str, asked: QuantType) -> Types | None:
        """See `Rule`."""
        if asked.is_affine:
            return None
        if _is_embedding(name) or name.endswith("lm_head.weight"):
            return (asked.eight_bit,)
        if _has(name, self.ATTENTION):
            return KEEP if asked is QuantType.MXFP8 else (asked,)
        if _has(name, self.DENSE):
            return (asked,) if _layer(name) in self.dense else KEEP
        return self._expert_types(name, asked)

    def _expert_types(self, name: str, asked: QuantType) -> Types:
        routed, shared = ".mlp.experts." in name, ".mlp.shared_expert." in name
        if not (routed or shared) or not name.endswith(self.PROJECTIONS):
            return KEEP
        if not name.endswith(".down_proj.weight"):
            return (asked,)
        sensitive = _more_bits(_layer(name), self.layers, middle_end=self.layers // 2 - 4)
        if asked is QuantType.MXFP8:
            return KEEP if shared or sensitive else (asked,)
        return _eight_bits(asked) if shared and sensitive else (asked,)


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model: the asked type for embedding and head, without the promotion that a target's get (draft.go).

    The quality of a draft only changes how many of its tokens are taken, and it reads its head for
    each of them.
    """

    def types(self, name: str, asked: QuantType) -> Types | None:
        """See `Rule`."""
        return (asked,) if _is_embedding(name) or name.endswith("lm_head.weight") else None


_QWEN35 = [
    f"{family}{mixture}For{task}"
    for family in ("Qwen3_5", "Qwen3Next")
    for mixture in ("", "Moe")
    for task in ("CausalLM", "ConditionalGeneration")
]
_GEMMA4 = [
    *(
        f"Gemma4{kind}For{task}"
        for kind in ("", "Unified")
        for task in ("CausalLM", "ConditionalGeneration")
    ),
    *("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
    *("gemma4_unified", "gemma4_unified_text", "gemma4_unified_assistant"),
]
_NEMOTRON_H = ["NemotronHForCausalLM", "NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3"]

# By the whole name, as in Ollama: an architecture that is not here has the general policy, whatever
# its name resembles.
_RULES: dict[str, Callable[[SourceConfig], ArchitectureRule]] = {
    **dict.fromkeys(_QWEN35, lambda _: Qwen35()),
    **dict.fromkeys(_GEMMA4, Gemma4.of),
    **dict.fromkeys(_NEMOTRON_H, NemotronH.of),
    "Cohere2MoeForCausalLM": Cohere2Moe.of,
    "LagunaForCausalLM": Laguna.of,
    "MuseGlimmerForConditionalGeneration": Glimmer.of,
}


def policy_for(config: SourceConfig | None, asked: QuantType, options: ImportOptions) -> Policy:
    """Return the policy for a checkpoint, by its config.json; without one, the general policy.

    Raises: DocumentError (rule Q1) when the number of layers or experts, which the architecture's
    rule needs, is invalid.
    """
    roles = roles_for(config, options.profile)
    policy: Policy = GeneralPolicy(asked, options, roles)
    if config is None:
        return policy
    if options.profile.knows_layouts and NormalizedHead.concerns(config):
        policy = RulePolicy(NormalizedHead(), policy, asked, options, roles, NormalizedHead.WHY)
    make_rule = _RULES.get(config.architecture)
    return (
        policy
        if make_rule is None
        else RulePolicy(make_rule(config), policy, asked, options, roles)
    )


def draft_policy_for(
    config: SourceConfig | None, asked: QuantType, options: ImportOptions
) -> Policy:
    """Return the policy for a draft model: its architecture's own, but for embedding and head.

    It is asked with the names of the draft's checkpoint, without the prefix ``draft.`` that its
    tensors have in a store: the layers' rules look for whole beginnings of names. ``options`` are
    the draft's: its type, its group size.

    Raises: as `policy_for`.
    """
    roles = roles_for(config, options.profile)
    return RulePolicy(Draft(), policy_for(config, asked, options), asked, options, roles)


def _has(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name for word in words)


def _is_embedding(name: str) -> bool:
    return name.endswith("embed_tokens.weight") and "per_layer" not in name


def _eight_bits(asked: QuantType) -> Types:
    return (asked.eight_bit, asked)


def _layer(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _more_bits(layer: int | None, layers: int, middle_end: int | None = None) -> bool:
    """Return True for the first and last eighth of the layers, and for every third between, up to ``middle_end``."""
    if layer is None:
        return False
    first, last = layers // 8, 7 * layers // 8
    between = layer < (last if middle_end is None else middle_end)
    return bool(layers) and (
        layer < first or layer >= last or (between and (layer - first) % 3 == 2)  # noqa: PLR2004
    )


def _text_sections(config: SourceConfig) -> list[Mapping[str, Any]]:
    return [_top(config), _section(config.text_config)]


def _top(config: SourceConfig) -> Mapping[str, Any]:
    return {"num_hidden_layers": config.num_hidden_layers, "num_experts": config.num_experts}


def _section(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any, kind: type, key: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise DocumentError(
            f"config.json: {key} is not a list of {kind.__name__} (rule Q1)", rule="Q1"
        )
    return value


def _count(sections: list[Mapping[str, Any]], key: str) -> int:
    """Return the first number of that key that is not 0, else 0."""
    for section in sections:
        value = section.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise DocumentError(
                f"config.json: {key} is {quoted(value)}, not a whole number (rule Q1)", rule="Q1"
            )
        if value:
            return int(value)
    return 0
