"""Runtimes: what mlx-lm and Ollama's runner need of the way a model is stored, by architecture. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from blobstore.checkpoint import SourceConfig
from blobstore.importer.options import ImportOptions
from blobstore.importer.policies.rule_policy import KEEP, Types
from blobstore.importer.profiles import Experts
from blobstore.quant import QuantType


@dataclass(frozen=True, slots=True)
class NormalizedHead:
    """Models whose head mlx-lm divides by its norms as it loads it: codes would be taken for values, so it is kept.

    Source: mlx_lm 0.32.2 models/bailing_moe.py, bailing_moe_linear.py (where ``norm_head`` is set), baichuan_m1.py,
    `sanitize`.
    """

    WHY = "is normalised by mlx-lm as it is loaded"

    def types(self, name: str, asked: QuantType) -> Types | None:  # noqa: ARG002  # whatever the type
        """See `Rule`."""
        return KEEP if name.endswith("lm_head.weight") else None

    @staticmethod
    def concerns(config: SourceConfig) -> bool:
        """Return True for a checkpoint of such a model."""
        has_option = config.model_type in ("bailing_moe", "bailing_moe_linear") and config.norm_head is True
        return has_option or config.model_type == "baichuan_m1"


# Runners of Ollama that read no packed experts: x/models/cohere2_moe/cohere2_moe.go `loadStackedExperts` at fb307609 ends
# with "missing stacked expert weights". Those of Qwen3.5 and Qwen3-Next, Laguna, Nemotron-H, GLM-4 MoE Lite and Gemma 4
# collect numbered experts too (`collectPerExpertProjection`, `collectExpertProjection`, `collectAndStackExpertWeights`).
_STACKED_ONLY = frozenset({"Cohere2MoeForCausalLM"})


def form_of_experts(config: SourceConfig | None, options: ImportOptions) -> Experts:
    """Return the form that experts are stored in: the asked one, else the one that runs, else the profile's."""
    if options.experts is not None:
        return options.experts
    return Experts.STACKED if needs_stacked_experts(config) else options.profile.experts


def needs_stacked_experts(config: SourceConfig | None) -> bool:
    """Return True when Ollama runs the architecture with stacked experts only."""
    return config is not None and config.architecture in _STACKED_ONLY
