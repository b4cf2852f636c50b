"""Documents: what JSON has of a result, and the JSON Schema of it.

A result is a dataclass. Its keys are its fields, or what its ``KEYS`` lists: ``key``, or
``key=attribute``, where the attribute may be a property, one of an attribute (``blob.digest``), or
a number (``len(blobs)``). A key that ends with ``?`` is left out where it says nothing: None,
False, 0.

Types come from the annotations, descriptions from texts in ``Annotated`` and from docstrings. Where
JSON has another type, ``Annotated`` has it, too: ``Annotated[float, float | None]`` is null for
infinity and NaN, which JSON does not have.
"""

import enum
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import cache, cached_property, partial
from inspect import cleandoc
from operator import attrgetter
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from blobstore.errors import BlobStoreError

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_NUMBER = "len("


class Key(NamedTuple):
    """A key of a document, the attribute that has its value, and what returns that."""

    name: str
    attribute: str
    is_optional: bool
    value_of: Callable[[Any], Any]


@cache
def keys_of(kind: Any) -> tuple[Key, ...]:
    """Return the keys of a class; none of a class that is written as a text."""
    texts = getattr(kind, "KEYS", None)
    if texts is None:
        is_object = is_dataclass(kind) and kind.__str__ is object.__str__
        texts = [field.name for field in fields(kind)] if is_object else ()
    keys = []
    for text in texts:
        given, _, other = text.partition("=")
        name = given.removesuffix("?")
        attribute = other or name
        is_plain = attribute.isidentifier()
        value_of = attrgetter(attribute) if is_plain else partial(_value_at, attribute)
        keys.append(Key(name, attribute, given.endswith("?"), value_of))
    return tuple(keys)


def _value_at(attribute: str, value: Any) -> Any:
    """Return ``a.b`` or ``len(a.b)``; None if ``a`` is None."""
    path = attribute.removeprefix(_NUMBER).rstrip(")")
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value if path == attribute else len(value)


def encoded(value: Any) -> Any:
    """Return what stands in JSON for a result, a name, a digest, a time and so on."""
    kind: Any = type(value)
    if keys := keys_of(kind):
        pairs = ((key, _number(key.value_of(value))) for key in keys)
        return {
            key.name: part
            for key, part in pairs
            if part or not key.is_optional or isinstance(part, Mapping)
        }
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%SZ")
    if isinstance(value, Mapping):
        return dict(value)
    return value.message if isinstance(value, BlobStoreError) else str(value)


def _number(value: Any) -> Any:
    """Return a value without infinities and NaN, if it is a number or a tuple of numbers."""
    if isinstance(value, tuple) and value and isinstance(value[0], float):
        return [_number(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(document: Any, indent: int | None = None) -> str:
    """Return results as a JSON text, in ASCII; without ``indent`` on one line, without spaces."""
    separators = (",", ":") if indent is None else None
    return json.dumps(document, indent=indent, separators=separators, default=encoded)


def document_of(result: Any) -> Any:
    """Return a result as lists and dicts of what JSON has."""
    return json.loads(to_json(result))


def schema_of(kind: Any, definitions: dict[str, Any], place: str = "#/$defs/") -> dict[str, Any]:
    """Return the JSON Schema of a type; those of classes are added to ``definitions``.

    ``place``: where references look for the definitions.
    """
    if get_origin(kind) is not None:
        return _generic(
            get_origin(kind), get_args(kind), lambda part: schema_of(part, definitions, place)
        )
    if keys := keys_of(kind):
        if kind.__name__ not in definitions:
            about: dict[str, Any] = {"description": cleandoc(kind.__doc__), "type": "object"}
            definitions[kind.__name__] = about
            about["properties"] = {
                key.name: schema_of(_type_at(kind, key.attribute), definitions, place)
                for key in keys
            }
            about["required"] = [key.name for key in keys if not key.is_optional]
            about["additionalProperties"] = False
        return {"$ref": f"{place}{kind.__name__}"}
    if kind is Any:
        return {}
    is_time = {"format": "date-time"} if kind is datetime else {}
    return {"type": _TYPES.get(kind, "string")} | is_time


def _generic(
    origin: Any, arguments: tuple[Any, ...], inner: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    if origin is Annotated:
        texts = [part for part in arguments[1:] if isinstance(part, str)]
        kinds = [part for part in arguments[1:] if isinstance(part, type | UnionType)]
        says = {"description": texts[0]} if texts else {}
        return inner([arguments[0], *kinds][-1]) | says
    if origin in (Union, UnionType):
        return {"anyOf": [inner(part) for part in arguments]}
    if origin is Literal:
        return {"type": _TYPES[type(arguments[0])], "enum": list(arguments)}
    if issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": inner(arguments[1])}
    return {"type": "array", "items": inner(arguments[0])}


def _type_at(kind: Any, attribute: str) -> Any:
    """Return the annotation of an attribute; of a property with its docstring's first sentence."""
    if attribute.startswith(_NUMBER):
        return int
    name, _, rest = attribute.partition(".")
    part = getattr(kind, name, None)
    if isinstance(part, property | cached_property):
        getter = part.fget if isinstance(part, property) else part.func
        hint = get_type_hints(getter, include_extras=True)["return"]
        says = " ".join((part.__doc__ or "").split()).partition(". ")[0].removesuffix(".")
        hint = hint if get_origin(hint) is Annotated else Annotated[hint, says]
    else:
        hint = get_type_hints(kind, include_extras=True)[name]
        hint = get_args(hint)[0] if get_origin(hint) is ClassVar else hint
    if not rest:
        return hint
    outer = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(outer) is UnionType:  # with None
        return _type_at(get_args(outer)[0], rest) | None
    return _type_at(outer, rest)
