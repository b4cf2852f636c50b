"""Conventions: names and tables by which an import and an export mean the same. Pure.

Stored tensors have the names of their source. Some names tell more: the group of an expert, or that
a tensor belongs to a draft model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.quant import QuantType

DRAFT_PREFIX = "draft."
"""The prefix of a draft model's tensors (x/create/manifest.go, ollama/ollama@1d7605bf)."""
DRAFT_FOLDER = "draft/"
"""Where a draft model's documents and files lie beside a model's."""
FILE_TYPE: Final = "file_type"
"""The key for the requested type in an exported file's metadata: Ollama's word for it."""
FILE_TYPES = frozenset(kind.value for kind in QuantType)
"""Its values; a file with another value is not an export of ours."""

_LAYER = (
    r"(?:|model\.|language_model\.|language_model\.model\.|model\.language_model\.|backbone\.|language_model\.backbone\."
    r"|model\.language_model\.backbone\.|mtp\.)layers\.[0-9]+"
)
GROUP = re.compile(
    rf"(?P<group>{_LAYER}\.(?:mlp\.experts|mlp\.shared_experts|moe\.experts|mixer\.experts|mixer\.shared_experts|mlp\.switch_mlp))"
    r"\.(?P<rest>.+)",
    re.ASCII | re.DOTALL,
)


def group_of(name: str) -> str | None:
    """Return the prefix of the expert group that a tensor belongs to, or None."""
    match = GROUP.fullmatch(name)
    return match["group"] if match else None


@dataclass(frozen=True, slots=True)
class ParserFamily:
    """An architecture family: words in its names, and what Ollama's parser for it can do."""

    words: tuple[str, ...]
    parser: str
    renderer: str
    tools: bool = True
    thinking: bool = True


# Tried in order: the more particular name first.
_FAMILIES = (
    ParserFamily(("glm4", "glm-4"), "glm-4.7", "glm-4.7"),
    ParserFamily(("deepseek",), "deepseek3", "deepseek3"),
    ParserFamily(("qwen3_5", "qwen3next", "qwen3_next"), "qwen3.5", "qwen3.5"),
    # Its parser can think only when the template does.
    ParserFamily(("qwen3",), "qwen3", "qwen3-coder", thinking=False),
    ParserFamily(("gemma4",), "gemma4", "gemma4"),
    ParserFamily(("cohere2",), "cohere", "cohere"),
    ParserFamily(("nemotronh", "nemotron_h"), "nemotron-3-nano", "nemotron-3-nano"),
    ParserFamily(("laguna",), "laguna", "laguna"),
    ParserFamily(("glimmer",), "glimmer", "glimmer"),
)


def family_of(config: SourceConfig | None, parser: str | None) -> ParserFamily | None:
    """Return the family whose parser the user names, else the architecture's, or None."""
    if parser:
        return next((family for family in _FAMILIES if family.parser == parser), None)
    for name in (
        (*(config.architectures or ()), config.model_type or "") if config is not None else ()
    ):
        for family in _FAMILIES:
            if any(word in name.lower() for word in family.words):
                return family
    return None
