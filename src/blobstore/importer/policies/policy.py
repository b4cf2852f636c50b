"""Runtimes: what mlx-lm and Ollama's runner need of the way a model is stored, by architecture.

Pure.

RulePolicy: a policy that a rule for some tensors makes of another one. Pure.

For each tensor a rule knows one of three things: types to try in turn, of which the first whose
groups divide the rows is taken; `KEEP`, its source's dtype; or None, which leaves it to the other
policy.

Policy: which type each tensor gets. Pure; the general policy of docs/formats.md section 6 (others:
architectures.py).

Source of the facts: ollama/ollama@fb307609 x/create/create.go `GetTensorQuantization`,
x/create/quantpolicy.go, and the recorded plans in fixtures/ollama-records. A policy sees output
tensors: stacked experts have rank 3 already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.quant import Quantization, QuantType
from blobstore.importer.policies.options import Experts, ImportOptions
from blobstore.importer.policies.roles import NamedRoles, Roles

_MIN_ELEMENTS = 1024
_SENSITIVE = (".v_proj", ".k_proj", "down_proj")


class Policy(Protocol):
    """Decides the quantization of one output tensor by its name and shape.

    A packed group of experts gets one type: there only `wants` is asked, so that what a policy
    keeps is kept, and what it would promote gets the asked type.
    """

    def wants(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True when the tensor is one that gets quantized if groups divide its rows."""

    def base_type(self, name: str) -> QuantType:
        """Return the type whose groups must divide the tensor's rows, or it is not quantized at all."""

    def quantization(self, name: str, shape: tuple[int, ...]) -> Quantization | None:
        """Return the quantization, or None to keep the source's dtype."""

    def reason(self, name: str, shape: tuple[int, ...]) -> str:
        """Return why a tensor that is kept is kept, as the end of a sentence that begins with its name."""


class GeneralPolicy:
    """The policy for architectures without one of their own, for one asked type."""

    def __init__(
        self, asked: QuantType, options: ImportOptions, roles: Roles | None = None
    ) -> None:
        self._asked = asked
        self._options = options
        self._roles = roles or NamedRoles()

    def wants(self, name: str, shape: tuple[int, ...]) -> bool:
        """See `Policy`: a weight matrix other than an embedding, norm, gate or part of another modality's tower."""
        return self._roles.kept_as(name, shape) is None and is_matrix(name, shape, self._roles)

    def quantization(self, name: str, shape: tuple[int, ...]) -> Quantization | None:
        """See `Policy`: the asked type, or 8 bits for the head and the sensitive projections."""
        base = self.base_type(name)
        if not self.wants(name, shape) or not self._options.fits(base, shape):
            return None
        promoted = self._promotes(name, shape) and self._options.fits(base.eight_bit, shape)
        return self._options.quantization(base.eight_bit if promoted else base)

    def base_type(self, name: str) -> QuantType:
        """See `Policy`: 8 bits for the head, else the asked type."""
        return self._asked.eight_bit if name.endswith("lm_head.weight") else self._asked

    def reason(self, name: str, shape: tuple[int, ...]) -> str:
        """See `Policy`."""
        role = self._roles.kept_as(name, shape)
        if role is not None:
            return f"is {role}"
        return unfit(name, shape, self._roles) or self._options.misfit(self.base_type(name), shape)

    def _promotes(self, name: str, shape: tuple[int, ...]) -> bool:
        if not any(word in name for word in _SENSITIVE):
            return False
        return self._asked is QuantType.INT4 or (
            self._asked.bits == 4 and not self._roles.is_expert(name, shape)  # noqa: PLR2004
        )


def is_matrix(name: str, shape: tuple[int, ...], roles: Roles) -> bool:
    """Return True for a weight matrix, or a stack of experts', of at least 1024 elements."""
    return unfit(name, shape, roles) is None


def unfit(name: str, shape: tuple[int, ...], roles: Roles) -> str | None:
    """Say why a tensor is not a weight matrix, or a stack of experts', of at least 1024 elements; None when it is one."""
    expert = roles.is_expert(name, shape)
    if not (expert or name.endswith(".weight")):
        return "is not called a weight"
    if math.prod(shape) < _MIN_ELEMENTS:
        return f"has fewer than {_MIN_ELEMENTS:,} weights"
    if len(shape) == 2 or (len(shape) == 3 and expert):  # noqa: PLR2004  # a matrix, or a stack of them
        return None
    return (
        f"has {len(shape)} dimensions and is not known as a stack of experts"
        if len(shape) > 2  # noqa: PLR2004
        else "is not a matrix"
    )


Types = tuple[QuantType, ...]

KEEP: Types = ()
_KEPT = "is kept by its architecture's policy"


class ArchitectureRule(Protocol):
    """What one architecture decides for itself."""

    def types(self, name: str, asked: QuantType) -> Types | None:
        """Return the types to try in turn, `KEEP`, or None to leave the tensor to the general policy."""


class RulePolicy:
    """A policy that follows a rule, and another policy where the rule leaves a tensor to it.

    What a rule decides holds for weight matrices and stacks of experts of at least 1024 elements,
    as in the general policy. Ollama asks neither there: it would quantize smaller ones, and try to
    with a bias whose name holds ``.v_proj``.
    """

    def __init__(
        self,
        rule: ArchitectureRule,
        others: Policy,
        asked: QuantType,
        options: ImportOptions,
        roles: Roles,
        why: str = _KEPT,
    ) -> None:
        self._rule = rule
        self._others = others
        self._asked = asked
        self._options = options
        self._roles = roles
        self._why = why

    def wants(self, name: str, shape: tuple[int, ...]) -> bool:
        """See `Policy`."""
        types = self._rule.types(name, self._asked)
        return (
            self._others.wants(name, shape)
            if types is None
            else bool(types) and is_matrix(name, shape, self._roles)
        )

    def base_type(self, name: str) -> QuantType:
        """See `Policy`: the last type that is tried."""
        types = self._rule.types(name, self._asked)
        return types[-1] if types else self._others.base_type(name)

    def quantization(self, name: str, shape: tuple[int, ...]) -> Quantization | None:
        """See `Policy`: the first type that fits."""
        types = self._rule.types(name, self._asked)
        if types is None:
            return self._others.quantization(name, shape)
        if not is_matrix(name, shape, self._roles):
            return None
        fitting = (quant_type for quant_type in types if self._options.fits(quant_type, shape))
        return next((self._options.quantization(quant_type) for quant_type in fitting), None)

    def reason(self, name: str, shape: tuple[int, ...]) -> str:
        """See `Policy`."""
        types = self._rule.types(name, self._asked)
        if types is None:
            return self._others.reason(name, shape)
        if not types:
            return self._why
        return unfit(name, shape, self._roles) or self._options.misfit(types[-1], shape)


@dataclass(frozen=True, slots=True)
class NormalizedHead:
    """Models whose head mlx-lm divides by its norms as it loads it: codes would be taken for values, so it is kept.

    Source: mlx_lm 0.32.2 models/bailing_moe.py, bailing_moe_linear.py (where ``norm_head`` is set),
    baichuan_m1.py, `sanitize`.
    """

    WHY = "is normalised by mlx-lm as it is loaded"

    def types(self, name: str, asked: QuantType) -> Types | None:  # noqa: ARG002  # whatever the type
        """See `Rule`."""
        return KEEP if name.endswith("lm_head.weight") else None

    @staticmethod
    def concerns(config: SourceConfig) -> bool:
        """Return True for a checkpoint of such a model."""
        has_option = (
            config.model_type in ("bailing_moe", "bailing_moe_linear") and config.norm_head is True
        )
        return has_option or config.model_type == "baichuan_m1"


# Runners of Ollama that read no packed experts: x/models/cohere2_moe/cohere2_moe.go
# `loadStackedExperts` at fb307609 ends with "missing stacked expert weights". Those of Qwen3.5 and
# Qwen3-Next, Laguna, Nemotron-H, GLM-4 MoE Lite and Gemma 4 collect numbered experts too
# (`collectPerExpertProjection`, `collectExpertProjection`, `collectAndStackExpertWeights`).
_STACKED_ONLY = frozenset({"Cohere2MoeForCausalLM"})


def form_of_experts(config: SourceConfig | None, options: ImportOptions) -> Experts:
    """Return the form that experts are stored in: the asked one, else the one that runs, else the profile's."""
    if options.experts is not None:
        return options.experts
    return Experts.STACKED if needs_stacked_experts(config) else options.profile.experts


def needs_stacked_experts(config: SourceConfig | None) -> bool:
    """Return True when Ollama runs the architecture with stacked experts only."""
    return config is not None and config.architecture in _STACKED_ONLY
