"""Documents: dataclasses that are made of JSON objects, and checked by the types of their fields.

A key has the name of its field, or that of a `Key`; unknown keys are ignored. Checks are strict: an
integer is an int and not a float or a bool, a text is a str. The first key that is wrong, in the
order of the fields, gives the error, in pydantic's words. Pydantic itself, which writes what
``--json`` prints, takes 140 ms of processor time to load, and every command reads some documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
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

from blobstore.errors import DocumentError, InvalidDigestError
from blobstore.names import Digest

_D = TypeVar("_D", bound="Document")
_NOUNS = {str: "string", int: "integer", bool: "boolean"}

Check = Callable[[Any], Any]
"""Returns the value of a JSON value. Raises: InvalidError."""


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
class AtMost:
    """The most characters of a text, or items of a list."""

    most: int

    def check(self, value: str | list[Any]) -> None:
        if len(value) > self.most:
            kind, unit = ("String", "characters") if isinstance(value, str) else ("List", "items")
            raise InvalidError(f"{kind} should have at most {self.most} {unit}")


@dataclass(frozen=True, slots=True)
class Between:
    """The least and the largest integer."""

    least: int
    most: float = math.inf

    def check(self, value: int | None) -> None:
        if value is not None and value < self.least:
            raise InvalidError(f"Input should be greater than or equal to {self.least}")
        if value is not None and value > self.most:
            raise InvalidError(f"Input should be less than or equal to {self.most}")


class Document:
    """The base of all documents, which are dataclasses."""

    __slots__ = ()

    @classmethod
    def checked(cls, value: Any) -> Self:
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise InvalidError(f"Input should be a valid dictionary or instance of {cls.__name__}")
        return cls(**cls.fields_of(value))

    @classmethod
    @cache
    def json_keys(cls) -> tuple[tuple[str, str, Check, bool], ...]:
        """Return the fields that are read: field, key, check, and whether the key is needed."""
        hints = get_type_hints(cls, include_extras=True)
        keys = []
        for field in fields(cast("Any", cls)):
            named = [item.name for item in get_args(hints[field.name])[1:] if isinstance(item, Key)]
            key = named[0] if named else field.name
            if key is not None:
                is_needed = field.default is MISSING and field.default_factory is MISSING
                keys.append((field.name, key, check_of(hints[field.name]), is_needed))
        return tuple(keys)

    @classmethod
    def fields_of(cls, value: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for field, key, check, is_needed in cls.json_keys():
            if key in value:
                try:
                    found[field] = check(value[key])
                except InvalidError as error:
                    raise error.within(key) from None
            elif is_needed:
                raise InvalidError("Field required", key)
        return found


def validated(model: type[_D], value: Any, what: str, rule: str) -> _D:
    """Return ``value`` as a document; raise DocumentError with ``rule`` and the place in it."""
    try:
        return model.checked(value)
    except InvalidError as error:
        raise DocumentError(f"{what}: {error} (rule {rule})", rule=rule) from None


@cache
def check_of(kind: Any) -> Check:
    """Return the check of a type as a field can have it."""
    origin, arguments = get_origin(kind), get_args(kind)
    check: Check = partial(_exactly, kind)
    if kind is Any:
        check = _unchanged
    elif kind is Digest:
        check = _digest
    elif isinstance(kind, type) and issubclass(kind, Document):
        check = kind.checked
    elif origin is Annotated:
        bounds = [item for item in arguments[1:] if isinstance(item, AtMost | Between)]
        check = partial(_bounded, check_of(arguments[0]), bounds)
    elif origin is Literal:
        check = partial(_one_of, arguments)
    elif origin in (Union, UnionType):
        check = partial(_any_of, [check_of(one) for one in arguments])
    elif origin in (list, tuple):
        check = partial(_items, check_of(arguments[0]), origin)
    elif origin is not None:  # a mapping
        check = partial(_members, check_of(arguments[1]))
    return check


def _unchanged(value: Any) -> Any:
    return value


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise InvalidError(f"Input should be a valid {_NOUNS.get(kind, 'null')}")
    return value


def _digest(value: Any) -> Digest:
    try:
        return value if isinstance(value, Digest) else Digest.parse(value)
    except InvalidDigestError as error:
        raise InvalidError(error.message) from None


def _bounded(check: Check, bounds: list[AtMost | Between], value: Any) -> Any:
    found = check(value)
    for bound in bounds:
        bound.check(found)
    return found


def _one_of(choices: tuple[str | int, ...], value: Any) -> Any:
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return value
    *first, last = map(repr, choices)
    shown = f"{', '.join(first)} or {last}" if first else last
    raise InvalidError(f"Input should be {shown}")


def _any_of(checks: list[Check], value: Any) -> Any:
    """Return what the first check that takes the value gives; else raise the innermost error."""
    errors = []
    for check in checks:
        try:
            return check(value)
        except InvalidError as error:
            errors.append(error)
    raise max(errors, key=lambda error: len(error.place))


def _items(check: Check, kind: type, value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise InvalidError(f"Input should be a valid {kind.__name__}")
    return kind(item for _, item in _each(check, enumerate(value)))


def _members(check: Check, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidError("Input should be a valid dictionary")
    return dict(_each(check, value.items()))


def _each(check: Check, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    for key, item in items:
        try:
            yield key, check(item)
        except InvalidError as error:
            raise error.within(key) from None
