"""tokenizer.json: what runtimes have to know of a tokenizer, without its vocabulary. Pure.

Source: huggingface/tokenizers tokenizers/src/tokenizer/serialization.rs: the model comes last, and
its type is its first key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self

TOKENIZER: Final = "tokenizer.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
TEMPLATE_DOCUMENTS: Final = ("tokenizer_config.json", "chat_template.json")
"""Documents that may have a chat template in them."""
_MODEL = re.compile(r'"model"\s*:\s*\{\s*"type"\s*:\s*("[^"\\]*")')
_WHITESPACE = r"\s+(?!\S)|\s+"
_NOT_IN_RE2 = re.compile(
    r"(\\[1-9])|\\[pP]\{\w*\}|\\.|\[(?:\\.|[^\]\\])*\]|(\(\?(?:[=!>]|<[=!])|[*+?}]\+)", re.DOTALL
)
"""Look-around, back references, atomic groups and possessive repetition; others are passed over."""


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A tokenizer: its model's type, how it splits texts first, and its added tokens.

    ``splits``: the regular expressions of its ``Split`` steps. ``replaces_spaces``: its decoder
    turns "▁" into a space, as SentencePiece's do.
    """

    kind: str | None
    splits: tuple[str, ...]
    replaces_spaces: bool
    tokens: frozenset[str]

    @classmethod
    def read(cls, raw: bytes) -> Self | None:
        try:
            text = raw.decode()
            value = _without_vocabulary(text) or json.loads(text)
            model = value["model"]
            kind, added = model.get("type"), value.get("added_tokens") or []
            return cls(
                kind if isinstance(kind, str) else None,
                tuple(_splits(value.get("pre_tokenizer"))),
                _replaces_spaces(value.get("decoder")),
                frozenset(str(token["content"]) for token in added),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    @property
    def strange_split(self) -> str | None:
        """The first regular expression that RE2, and so Go, does not have; None without one.

        Ollama rewrites the usual end of one, white space before a word (ollama/ollama@0f41bb42
        x/tokenizer/tokenizer_load.go `rewritePatternForRE2`).
        """
        for split in self.splits:
            found = _NOT_IN_RE2.finditer(split.replace(_WHITESPACE, r"\s+"))
            if any(match[1] or match[2] for match in found):
                return split
        return None


def _without_vocabulary(text: str) -> dict[str, Any] | None:
    """Return the document up to its model's type; None if these do not come in this order.

    The vocabulary, which comes after it, has most of the bytes.
    """
    match = _MODEL.search(text)
    if match is None:
        return None
    try:
        value = json.loads(f'{text[: match.start()]}"model":{{"type":{match[1]}}}}}')
    except ValueError:  # that model is within another value
        return None
    return value if isinstance(value, dict) else None


def _steps(value: Any, key: str) -> Iterator[dict[str, Any]]:
    steps = value[key] if isinstance(value, dict) and value.get("type") == "Sequence" else [value]
    yield from (step for step in steps if isinstance(step, dict))


def _splits(value: Any) -> Iterator[str]:
    for step in _steps(value, "pretokenizers"):
        pattern = step.get("pattern")
        if step.get("type") == "Split" and isinstance(pattern, dict) and pattern.get("Regex"):
            yield str(pattern["Regex"])


def _replaces_spaces(value: Any) -> bool:
    return any(
        step.get("type") == "Replace" and step.get("pattern") == {"String": "▁"}
        for step in _steps(value, "decoders")
    )
