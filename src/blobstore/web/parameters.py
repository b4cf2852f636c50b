"""Parameters of an address: their types and limits, and the values in a query."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl

from blobstore.errors import UsageError, quoted

MAX_QUERY = 32 * 1024
"""Bytes of a query: as many as the parameters of a route can have. A longer one is not parsed."""
_MAX_FIELDS = 64
_MAX_NAME = 620
"""Characters of a model's name with all its parts (names.py)."""
_NAME = r"^[A-Za-z0-9_.:/-]+$"
"""Characters of a model's name. Which names are valid, names.py says."""
_MAX_TENSOR = 2048
"""Characters of a tensor's name. Longer ones are possible in a file, and not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryParameter:
    """A text in the query of an address, from 1 to ``longest`` characters.

    ``pattern``: a regular expression that it has to match. ``most``: how often it may be given;
    ``least``: how often it has to be.
    """

    name: str
    what: str
    longest: int
    pattern: str | None = None
    least: int = 1
    most: int = 1

    @property
    def is_list(self) -> bool:
        """True if several values are possible."""
        return self.most > 1

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of its value."""
        text: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": self.longest}
        if self.pattern is not None:
            text["pattern"] = self.pattern
        if not self.is_list:
            return text
        return {"type": "array", "items": text, "minItems": self.least, "maxItems": self.most}

    def value(self, given: Sequence[str]) -> Any:
        """Return its value: a text, or a list of texts. Raises: UsageError."""
        if not self.least <= len(given) <= self.most:
            times = f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"
            raise UsageError(
                f"the parameter {self.name!r} is given {len(given)} times, expected {times}",
                hint=f"{self.name} is {self.what}.",
            )
        for text in given:
            if not 1 <= len(text) <= self.longest:
                message = f"the parameter {self.name!r} has {len(text):,} characters"
                raise UsageError(f"{message}, expected 1 to {self.longest:,}")
            if self.pattern is not None and re.search(self.pattern, text) is None:
                raise UsageError(f"the parameter {self.name!r} contains an invalid character")
        if self.is_list:
            return list(given)
        return given[0] if given else None


MODEL = QueryParameter(
    name="model", what="the name of a stored model", longest=_MAX_NAME, pattern=_NAME
)
NAME = replace(MODEL, name="name")
MODELS = replace(MODEL, what="the name of a stored model; repeatable", most=60)
TENSOR = QueryParameter(
    name="tensor", what="the name of a tensor of the model", longest=_MAX_TENSOR
)


def values_in(query: bytes, parameters: Sequence[QueryParameter]) -> Mapping[str, Any]:
    """Return the values of ``parameters`` in a query, by name.

    Raises: UsageError for a parameter that is missing, unknown, too long or given too often, and
    for text that is not UTF-8.
    """
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_FIELDS,
        )
    except ValueError as error:
        raise UsageError("the query is not percent-encoded UTF-8, or is too long") from error
    given: dict[str, list[str]] = {one.name: [] for one in parameters}
    for name, text in pairs:
        if name not in given:
            hint = f"Use {', '.join(given)}." if given else "This address takes no parameters."
            raise UsageError(f"unknown parameter {quoted(name)}", hint=hint)
        given[name].append(text)
    return {one.name: one.value(given[one.name]) for one in parameters}
