"""Policies by architecture, made from a few lines of config.json, and what they decide."""

from __future__ import annotations

import json
from typing import Any

from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.quant import QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.policy import Policy, policy_for

SHAPE = (128, 128)

GEMMA4, COHERE2, GLIMMER = (
    "Gemma4ForCausalLM",
    "Cohere2MoeForCausalLM",
    "MuseGlimmerForConditionalGeneration",
)
LAGUNA, NEMOTRON, QWEN = "LagunaForCausalLM", "NemotronHForCausalLM", "Qwen3_5ForCausalLM"


def policy_of(
    architecture: str, asked: str, profile: str = "ollama", *, draft: bool = False, **config: Any
) -> Policy:
    """Return the policy for a checkpoint of that architecture and ``config``."""
    source = SourceConfig.parse(json.dumps({"architectures": [architecture], **config}).encode())
    options = ImportOptions.parse(quant=asked, profile=profile)
    return policy_for(source, QuantType.parse(asked), options, is_draft=draft)


def type_of(policy: Policy, name: str, shape: tuple[int, ...] = SHAPE) -> str | None:
    """Return the type that a tensor gets, or None."""
    quantization = policy.quantization(name, shape)
    return None if quantization is None else quantization.quant_type.value


def promoted_layers(policy: Policy, name: str, layers: int) -> list[int]:
    """Return the layers at which ``name`` gets another type than the asked one."""
    types = [type_of(policy, name.format(layer=layer)) for layer in range(layers)]
    return [layer for layer, given in enumerate(types) if given in ("int8", "mxfp8")]
