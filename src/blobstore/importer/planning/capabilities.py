"""Capabilities: the config blob of a model, from its architecture and its chat template. Pure.

Source of the tables: ollama/ollama@fb307609 x/create/client/create.go and x/create/capabilities.go, model/parsers, and the
recorded configs in fixtures/ollama-records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from blobstore.checkpoint import SourceConfig
from blobstore.documents import REQUIRED_OLLAMA, Draft, ModelConfig
from blobstore.errors import UnsupportedSourceError
from blobstore.importer.options import ImportOptions
from blobstore.source.classify import quant_type_of
from blobstore.source.inventory import Inventory
from blobstore.source.weights import SourceWeight


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture family: words that its names contain, and what Ollama's parser for it can do."""

    words: tuple[str, ...]
    parser: str
    renderer: str
    tools: bool = True
    thinking: bool = True


# Tried in order: the more particular name first.
_FAMILIES = (
    Family(("glm4", "glm-4"), "glm-4.7", "glm-4.7"),
    Family(("deepseek",), "deepseek3", "deepseek3"),
    Family(("qwen3_5", "qwen3next", "qwen3_next"), "qwen3.5", "qwen3.5"),
    # Its parser can think only when the template does.
    Family(("qwen3",), "qwen3", "qwen3-coder", thinking=False),
    Family(("gemma4",), "gemma4", "gemma4"),
    Family(("cohere2",), "cohere", "cohere"),
    Family(("nemotronh", "nemotron_h"), "nemotron-3-nano", "nemotron-3-nano"),
    Family(("laguna",), "laguna", "laguna"),
    Family(("glimmer",), "glimmer", "glimmer"),
)
_THINK_TAGS = ("<think>", "</think>")
_TEMPLATE_DOCUMENTS = ("tokenizer_config.json", "chat_template.json")


def family_of(config: SourceConfig | None, parser: str | None) -> Family | None:
    """Return the family whose parser the user names, else the architecture's, or None."""
    if parser:
        return next((family for family in _FAMILIES if family.parser == parser), None)
    for name in (*(config.architectures or ()), config.model_type or "") if config is not None else ():
        for family in _FAMILIES:
            if any(word in name.lower() for word in family.words):
                return family
    return None


def describe_model(
    inventory: Inventory, weights: tuple[SourceWeight, ...], options: ImportOptions, draft: Inventory | None = None
) -> ModelConfig:
    """Return the config blob of the model that an import makes; a bare weights file has no capabilities.

    Raises: UnsupportedSourceError for a draft model without an architecture.
    """
    quant_type = options.quant_type
    if quant_type is None and not options.requantize:
        quant_type = quant_type_of(weights, inventory.config)
    config, family = inventory.config, family_of(inventory.config, options.modelfile.parser)
    described = ModelConfig(
        model_format="safetensors",
        file_type=quant_type.value if quant_type is not None else "",
        renderer=family.renderer if family else None,
        parser=family.parser if family else None,
        requires=REQUIRED_OLLAMA,
        capabilities=list(_capabilities(inventory, config, family)) if config is not None else [],
        draft=_draft(draft) if draft is not None else None,
    )
    return options.modelfile.configure(described)


def _draft(inventory: Inventory) -> Draft:
    architecture = inventory.config.architecture if inventory.config is not None else ""
    if not architecture:
        raise UnsupportedSourceError(
            f"the draft model {inventory.path} has no config.json that names its architecture", path=inventory.path
        )
    return Draft.of(architecture)


def _capabilities(inventory: Inventory, config: SourceConfig, family: Family | None) -> Iterator[str]:
    yield "completion"
    if config.vision_config is not None or config.has_vision:
        yield "vision"
    if config.audio_config is not None or config.sound_config is not None:
        yield "audio"
    if family is not None and family.tools:
        yield "tools"
    if (family is not None and family.thinking) or _template_thinks(inventory):
        yield "thinking"


def _template_thinks(inventory: Inventory) -> bool:
    return any(tag in template for template in _templates(inventory) for tag in _THINK_TAGS)


def _templates(inventory: Inventory) -> Iterator[str]:
    """Yield the texts of the chat templates in the tokenizer's documents; a document that is no JSON has none."""
    for name in _TEMPLATE_DOCUMENTS:
        try:
            document = json.loads(inventory.documents.get(name, b"{}"))
        except (ValueError, RecursionError):
            continue
        template = document.get("chat_template") if isinstance(document, dict) else None
        if isinstance(template, str):
            yield template
        elif isinstance(template, list):  # transformers' form for several named templates
            yield from (str(item.get("template")) for item in template if isinstance(item, dict))
