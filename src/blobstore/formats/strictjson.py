"""JSON as strict as RFC 8259 allows, and the compact text that Go's encoding/json writes.

Python's parser is too lax: it keeps the last of duplicate keys, takes ``NaN``, reads ``-0`` as 0
and recurses as deep as the input. Here duplicate keys, ``NaN`` and deep nesting are errors and
``-0`` is a float, so that all readers of a file agree. The number of values is bounded before any
is made: Python needs 64 bytes and more for each ``[]``, so a text that compresses to a few KB could
take gigabytes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from blobstore.errors import DocumentError, LimitExceededError, quoted

MAX_DEPTH = 64
MAX_VALUES = 1_000_000
"""Values of one text, at any depth: a manifest of 110,000 layers has 550,000."""
_NODES = (dict, list)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
MAX_NUMBER = 1e308
MAX_CONFIG = 16 * 2**20
"""Bytes of a config.json."""


Reason = Literal["utf8", "syntax", "duplicate", "depth", "number", "values"]


class StrictJsonError(ValueError):
    """The text is not strict JSON; the caller's rules have a number for each ``reason``."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def parse(raw: bytes, *, non_finite: bool = False, values: int = MAX_VALUES) -> Any:
    """Return the Python value of one JSON text in UTF-8 without a byte order mark.

    ``-0`` is read as a float. ``non_finite``: also read ``Infinity``, ``-Infinity`` and ``NaN``,
    which are not JSON, but which Python writes. ``values``: the most that the text may have.

    Raises: StrictJsonError with reason utf8 (also half a surrogate pair as an escape), syntax (also
    integers of over 4300 digits, and ``Infinity`` without ``non_finite``), duplicate (a key twice
    in one object, compared after unescaping), depth (deeper than the interpreter recurses;
    `check_depth` holds the limit of 64) or values.
    """
    if _has_more_values(raw, values):
        raise StrictJsonError("values", f"it has more than {values:,} values")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StrictJsonError("utf8", f"not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=float if non_finite else _refuse_constant,
            parse_int=(lambda digits: -0.0 if digits == "-0" else int(digits))
            if "-0" in text
            else None,
        )
    except StrictJsonError:
        raise
    except RecursionError:
        raise StrictJsonError("depth", f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise StrictJsonError("syntax", f"not valid JSON: {error}") from None
    if "\\u" in text:  # json.loads accepts a lone \\ud800, but its string can't be encoded
        try:
            for node in _nodes(value):
                if isinstance(node, str):
                    node.encode()
        except UnicodeEncodeError:
            raise StrictJsonError("utf8", "a \\u escape is half of a surrogate pair") from None
    return value


def parse_object(
    raw: bytes,
    what: str,
    *,
    rule: str,
    limit: int = MAX_CONFIG,
    non_finite: bool = False,
    values: int = MAX_VALUES,
) -> dict[str, Any]:
    """Return the JSON object in ``raw``; ``non_finite`` and ``values`` as in `parse`.

    Raises: DocumentError with ``rule`` if it is not one or has over 64 levels; LimitExceededError
    over ``limit`` bytes, or too many values.
    """
    check_limit(what, len(raw), "bytes", limit, rule)
    if not raw.strip(b" \t\r\n\0"):  # a hole of a sparse file, for example
        raise DocumentError(f"{what} is empty (rule {rule})", rule=rule)
    try:
        value = parse(raw, non_finite=non_finite, values=values)
        check_depth(value)
    except StrictJsonError as error:
        if error.reason == "values":
            raise LimitExceededError(
                f"limit exceeded: {what}: {error} (rule {rule})", rule=rule
            ) from None
        raise DocumentError(f"{what}: {error} (rule {rule})", rule=rule) from None
    if not isinstance(value, dict):
        raise DocumentError(f"{what} is not a JSON object (rule {rule})", rule=rule)
    return value


def check_limit(what: str, count: int, unit: str, limit: int, rule: str) -> None:
    """Raise LimitExceededError with ``rule`` if ``what`` has more than ``limit`` of a unit."""
    if count > limit:
        message = f"limit exceeded: {what} has {count:,} {unit}, at most {limit:,}"
        raise LimitExceededError(message, rule=rule)


def check_depth(value: Any, levels: int = MAX_DEPTH) -> None:
    """Raise StrictJsonError (depth) if ``value``, itself a level, has over ``levels`` levels."""
    level = [value] if isinstance(value, _NODES) else []
    for _ in range(levels - 1):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, _NODES)
        ]
        if not level:
            return
    if not any(level):  # what is in the last level's objects and arrays would be one more
        return
    raise StrictJsonError("depth", f"nested deeper than {MAX_DEPTH} levels")


def check_numbers(value: Any) -> None:
    """Raise StrictJsonError (number) for a number in ``value`` beyond ±1e308.

    64-bit floats end at 1.8e308. Beyond that Python reads infinity, Go refuses, and so does
    serde_json from 1.79e308 on.
    """
    for node in _nodes(value):
        if isinstance(node, int | float) and not -MAX_NUMBER <= node <= MAX_NUMBER:
            raise StrictJsonError("number", f"beyond {MAX_NUMBER:g}")


def _nodes(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, dict):
            waiting.extend(node)
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _has_more_values(raw: bytes, limit: int) -> bool:
    """Return True if a JSON text has more than ``limit`` values: a comma or an opening each.

    The ones within strings are left out if they matter.
    """

    def openings(text: bytes) -> int:
        return sum(map(text.count, (b",", b"[", b"{")))

    return openings(raw) >= limit and openings(_STRING.sub(b"", raw)) >= limit


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise StrictJsonError("duplicate", f"the key {quoted(key)} appears twice")
    return result


def _refuse_constant(word: str) -> Any:
    raise StrictJsonError("syntax", f"not valid JSON: {word}")


def without_none(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object without the keys whose value is None."""
    return {key: item for key, item in value.items() if item is not None}


_GO_ESCAPES = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encode(value: Any) -> bytes:
    """Return compact JSON in UTF-8 as Go's encoding/json writes it; see `text_of`."""
    return text_of(value).encode()


def text_of(value: Any) -> str:
    """Return JSON as Go's encoding/json writes it: no spaces, ``< > &`` and U+2028/9 escaped.

    Dictionaries keep their order. Source: go/src/encoding/json/encode.go, `HTMLEscape`;
    docs/formats.md section 1.
    """
    text = _ENCODER.encode(value)
    for character, escaped in _GO_ESCAPES.items():
        text = text.replace(character, escaped)
    return text
