"""Documents: values that are made of JSON objects, each key with its check.

A document is a frozen dataclass, and its ``KEYS`` say how a key becomes the field of the same
place. Checks are strict: an integer is an int and not a float or a bool, a text is a str. Unknown
keys are ignored. The first key that is wrong, in the order of ``KEYS``, gives the error. Its words
are pydantic's, which reads other documents (views, plans that travel); but every command needs a
few documents, and pydantic takes longer to load than they take to check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeVar

from blobstore.errors import DocumentError

_D = TypeVar("_D", bound="Document")
_T = TypeVar("_T")

Check = Callable[[Any], Any]
"""Returns the value of a JSON value. Raises: InvalidError."""


class InvalidError(ValueError):
    """A value is not what its place needs: the reason, and the place as keys and indices."""

    def __init__(self, reason: str, *place: str | int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = place

    def within(self, key: str | int) -> InvalidError:
        """Return the error as one of the value that contains this one at ``key``."""
        return InvalidError(self.reason, key, *self.place)

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.place)) or 'document'}: {self.reason}"


class Key(NamedTuple):
    """How one key of a document is checked.

    ``name``: the key, if it is not the name of the field. ``needed``: without it, the document is
    invalid; else the field has its default.
    """

    check: Check
    name: str | None = None
    needed: bool = False


class Document:
    """The base of all documents, which are dataclasses."""

    __slots__ = ()
    KEYS: ClassVar[Mapping[str, Key]]

    @classmethod
    def checked(cls, value: Any) -> Self:
        """Return the document in a JSON value. Raises: InvalidError."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise InvalidError(f"Input should be a valid dictionary or instance of {cls.__name__}")
        return cls(**cls.fields_of(value))

    @classmethod
    def fields_of(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that an object gives. Raises: InvalidError."""
        fields = {}
        for field, (check, given, needed) in cls.KEYS.items():
            name = given or field
            if name in value:
                try:
                    fields[field] = check(value[name])
                except InvalidError as error:
                    raise error.within(name) from None
            elif needed:
                raise InvalidError("Field required", name)
        return fields


def validated(model: type[_D], value: dict[str, Any], what: str, rule: str) -> _D:
    """Return ``value`` as a document; raise DocumentError with ``rule`` and the place in it."""
    try:
        return model.checked(value)
    except InvalidError as error:
        raise DocumentError(f"{what}: {error} (rule {rule})", rule=rule) from None


def anything(value: _T) -> _T:
    """Return the value."""
    return value


def text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise InvalidError("Input should be a valid string")
    return value


def short_text(most: int) -> Check:
    """Return the check of a text of at most ``most`` characters."""

    def check(value: Any) -> str:
        found = text(value)
        if len(found) > most:
            raise InvalidError(f"String should have at most {most} characters")
        return found

    return check


def integer(least: int | None = None, most: int | None = None) -> Check:
    """Return the check of an integer within bounds."""

    def check(value: Any) -> int:
        if type(value) is not int:
            raise InvalidError("Input should be a valid integer")
        if least is not None and value < least:
            raise InvalidError(f"Input should be greater than or equal to {least}")
        if most is not None and value > most:
            raise InvalidError(f"Input should be less than or equal to {most}")
        return value

    return check


def boolean(value: Any) -> bool:
    """Return a bool."""
    if not isinstance(value, bool):
        raise InvalidError("Input should be a valid boolean")
    return value


def one_of(*choices: str | int) -> Check:
    """Return the check of one of several texts or integers."""
    *first, last = map(repr, choices)
    shown = f"{', '.join(first)} or {last}" if first else last

    def check(value: Any) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise InvalidError(f"Input should be {shown}")
        return value

    return check


def optional(inner: Check) -> Check:
    """Return the check of a value that may be null."""
    return lambda value: None if value is None else inner(value)


def items(inner: Check, most: int | None = None) -> Check:
    """Return the check of a list of values; ``most`` of them, if it is given."""

    def check(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise InvalidError("Input should be a valid list")
        if most is not None and len(value) > most:
            allowed = f"List should have at most {most} items"
            raise InvalidError(f"{allowed} after validation, not {len(value)}")
        found = []
        for index, item in enumerate(value):
            try:
                found.append(inner(item))
            except InvalidError as error:
                raise error.within(index) from None
        return found

    return check


def members(inner: Check) -> Check:
    """Return the check of an object of any keys, whose values are alike."""

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InvalidError("Input should be a valid dictionary")
        found = {}
        for key, item in value.items():
            try:
                found[text(key)] = inner(item)
            except InvalidError as error:
                raise error.within(key) from None
        return found

    return check


ANY_OBJECT: Final = members(anything)
