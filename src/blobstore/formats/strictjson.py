"""JSON as strict as RFC 8259 allows, and the compact text that Go's encoding/json writes.

Python's parser is too lax: it keeps the last of duplicate keys, takes ``NaN``, reads ``-0`` as 0
and recurses as deep as the input. Here duplicate keys, ``NaN`` and deep nesting are errors and
``-0`` is a float, so that all readers of a file agree. The number of values is bounded before any
is made: Python needs 64 bytes and more for each ``[]``, so a text that compresses to a few KB could
take gigabytes.

Documents are dataclasses that are made of JSON objects, and checked by the types of their fields.
A key has the name of its field, or that of a `Key`; unknown keys are ignored. Checks are strict: an
integer is an int and not a float or a bool, a text is a str. The first key that is wrong, in the
order of the fields, gives the error, in pydantic's words. Pydantic itself takes 140 ms of
processor time to load, and every command reads some documents; the tests compare with it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from itertools import chain, islice
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from blobstore.errors import DocumentError, InvalidDigestError, LimitExceededError, quoted
from blobstore.names import Digest

MAX_DEPTH = 64
# Values of one text, at any depth: a manifest of 110,000 layers has 550,000.
_MAX_VALUES = 1_000_000
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
MAX_NUMBER = 1e308
MAX_CONFIG = 16 * 2**20
"""Bytes of a config.json."""


class StrictJsonError(ValueError):
    """The text is not strict JSON; the caller's rules have a number for each ``reason``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def parse(raw: bytes, *, non_finite: bool = False, values: int = _MAX_VALUES) -> Any:
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
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=float if non_finite else _refuse_constant,
            parse_int=(lambda digits: -0.0 if digits == "-0" else int(digits))
            if "-0" in text
            else None,
        )
        if "\\u" in text:  # json.loads accepts a lone \\ud800, but its string can't be encoded
            json.dumps(value, ensure_ascii=False).encode()
    except StrictJsonError:
        raise
    except UnicodeDecodeError as error:
        raise StrictJsonError("utf8", f"not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise StrictJsonError("utf8", "a \\u escape is half of a surrogate pair") from None
    except RecursionError:
        raise StrictJsonError("depth", f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise StrictJsonError("syntax", f"not valid JSON: {error}") from None
    return value


def parse_object(
    raw: bytes,
    what: str,
    *,
    rule: str,
    limit: int = MAX_CONFIG,
    non_finite: bool = False,
    values: int = _MAX_VALUES,
) -> dict[str, Any]:
    """Return the JSON object in ``raw``; ``non_finite`` and ``values`` as in `parse`.

    Raises: DocumentError with ``rule`` if it is not one or has over 64 levels; LimitExceededError
    over ``limit`` bytes, or too many values.
    """
    check_limit(what, len(raw), "bytes", limit, rule)
    if not raw.strip(b" \t\r\n\0"):
        raise DocumentError(f"{what} is empty (rule {rule})", rule=rule)
    if b"\0" in raw:  # a hole of a sparse file, whose text would take as much memory again
        reason = "not valid JSON: it contains a NUL byte"
        raise DocumentError(f"{what}: {reason} (rule {rule})", rule=rule)
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


def check_limit(what: str, count: int, unit: str, limit: int, rule: str | None = None) -> None:
    """Raise LimitExceededError with ``rule`` if ``what`` has more than ``limit`` of a unit."""
    if count > limit:
        message = f"limit exceeded: {what} has {count:,} {unit}, at most {limit:,}"
        raise LimitExceededError(message, rule=rule)


def check_depth(value: Any, levels: int = MAX_DEPTH) -> None:
    """Raise StrictJsonError (depth) if ``value``, itself a level, has over ``levels`` levels."""
    if sum(1 for _ in islice(_levels(value), levels + 1)) > levels:
        raise StrictJsonError("depth", f"nested deeper than {MAX_DEPTH} levels")


def check_numbers(value: Any) -> None:
    """Raise StrictJsonError (number) for a number in ``value`` beyond ±1e308.

    64-bit floats end at 1.8e308. Beyond that Python reads infinity, Go refuses, and so does
    serde_json from 1.79e308 on.
    """
    for node in chain.from_iterable(_levels(value)):
        if isinstance(node, int | float) and not -MAX_NUMBER <= node <= MAX_NUMBER:
            raise StrictJsonError("number", f"beyond {MAX_NUMBER:g}")


def _levels(value: Any) -> Iterator[list[Any]]:
    """Yield the value in a list, then the values that it has, then those that they have."""
    level = [value]
    while level:
        yield level
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]


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


_GO_ESCAPES = str.maketrans(
    {
        "<": "\\u003c",
        ">": "\\u003e",
        "&": "\\u0026",
        "\u2028": "\\u2028",
        "\u2029": "\\u2029",
    }
)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encode(value: Any) -> bytes:
    """Return compact JSON in UTF-8 as Go's encoding/json writes it; see `text_of`."""
    return text_of(value).encode()


def text_of(value: Any) -> str:
    """Return JSON as Go's encoding/json writes it: no spaces, ``< > &`` and U+2028/9 escaped.

    Dictionaries keep their order. Source: go/src/encoding/json/encode.go, `HTMLEscape`;
    docs/formats.md section 1.
    """
    return _ENCODER.encode(value).translate(_GO_ESCAPES)


_D = TypeVar("_D", bound="Document")
_NOUNS = {str: "string", int: "integer", bool: "boolean"}

# Returns the value of a JSON value. Raises: InvalidError.
_Check = Callable[[Any], Any]


class InvalidError(ValueError):
    """A value does not fit its place: the reason, and the place as keys and indices."""

    def __init__(self, reason: str, *place: str | int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = place

    def within(self, key: str | int) -> InvalidError:
        return InvalidError(self.reason, key, *self.place)

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.place)) or 'document'}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Key:
    """The name of a field's key; None for a field that is not read."""

    name: str | None


@dataclass(frozen=True, slots=True)
class Between:
    """The least and the largest integer; ``most`` characters of a text, or items of a list."""

    least: int
    most: float = math.inf

    def check(self, value: Any) -> None:
        if isinstance(value, int):
            if value < self.least:
                raise InvalidError(f"Input should be greater than or equal to {self.least}")
            if value > self.most:
                raise InvalidError(f"Input should be less than or equal to {self.most}")
        elif value is not None and len(value) > self.most:
            kind, unit = ("String", "characters") if isinstance(value, str) else ("List", "items")
            raise InvalidError(f"{kind} should have at most {self.most} {unit}")


class Document:
    """The base of all documents, which are dataclasses."""

    __slots__ = ()

    @classmethod
    def from_json(cls, value: Any) -> Self:
        if not isinstance(value, dict):
            raise InvalidError(f"Input should be a valid dictionary or instance of {cls.__name__}")
        return cls(**cls.fields_of(value))

    @classmethod
    @cache
    def json_keys(cls) -> tuple[tuple[str, str, _Check, bool], ...]:
        """Return the fields that are read: field, key, check, and whether the key is needed."""
        hints = get_type_hints(cls, include_extras=True)
        keys = []
        for field in fields(cast("Any", cls)):
            hint = hints[field.name]
            named = (item.name for item in get_args(hint)[1:] if isinstance(item, Key))
            if (key := next(named, field.name)) is not None:
                is_needed = field.default is MISSING and field.default_factory is MISSING
                keys.append((field.name, key, check_of(hint), is_needed))
        return tuple(keys)

    @classmethod
    def fields_of(cls, value: dict[str, Any]) -> dict[str, Any]:
        values = {}
        for field, key, check, is_needed in cls.json_keys():
            if key in value:
                values[field] = checked_at(key, check, value[key])
            elif is_needed:
                raise InvalidError("Field required", key)
        return values


def parse_document(model: type[_D], value: Any, what: str, rule: str) -> _D:
    """Return ``value`` as a document; raise DocumentError with ``rule`` and the place in it."""
    try:
        return model.from_json(value)
    except InvalidError as error:
        raise DocumentError(f"{what}: {error} (rule {rule})", rule=rule) from None


@cache
def check_of(kind: Any) -> _Check:
    """Return the check of a type as a field can have it."""
    if (origin := get_origin(kind)) is Annotated:
        inner, *more = get_args(kind)
        bounds = [bound for bound in more if isinstance(bound, Between)]
        return partial(_bounded, check_of(inner), bounds) if bounds else check_of(inner)
    if origin is not None:
        return partial(_GENERIC.get(origin, _members), get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Document):
        return kind.from_json
    return _digest if kind is Digest else partial(_exactly, kind)


def _exactly(kind: Any, value: Any) -> Any:
    if kind is not Any and type(value) is not kind:
        raise InvalidError(f"Input should be a valid {_NOUNS.get(kind, 'null')}")
    return value


def _digest(value: Any) -> Digest:
    try:
        return Digest.parse(value)
    except InvalidDigestError as error:
        raise InvalidError(error.message) from None


def _bounded(check: _Check, bounds: list[Between], value: Any) -> Any:
    checked = check(value)
    for bound in bounds:
        bound.check(checked)
    return checked


def _one_of(choices: tuple[str | int, ...], value: Any) -> Any:
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return value
    *first, last = map(repr, choices)
    shown = f"{', '.join(first)} or {last}" if first else last
    raise InvalidError(f"Input should be {shown}")


def _any_of(kinds: tuple[Any, ...], value: Any) -> Any:
    """Return the value as the first of the types that takes it; else raise the innermost error."""
    errors = []
    for kind in kinds:
        try:
            return check_of(kind)(value)
        except InvalidError as error:
            errors.append(error)
    raise max(errors, key=lambda error: len(error.place))


def _items(kind: type, arguments: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise InvalidError(f"Input should be a valid {kind.__name__}")
    check = check_of(arguments[0])
    return kind(checked_at(number, check, item) for number, item in enumerate(value))


def _members(arguments: tuple[Any, ...], value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidError("Input should be a valid dictionary")
    check = check_of(arguments[1])
    return {key: checked_at(key, check, item) for key, item in value.items()}


# The checks of types with arguments; all others are mappings.
_GENERIC: Mapping[Any, Callable[[tuple[Any, ...], Any], Any]] = {
    Literal: _one_of,
    Union: _any_of,
    UnionType: _any_of,
    list: partial(_items, list),
    tuple: partial(_items, tuple),
}


def checked_at(place: str | int, check: _Check, value: Any) -> Any:
    """Return what the check makes of the value at a key or index, which its error names."""
    try:
        return check(value)
    except InvalidError as error:
        raise error.within(place) from None
