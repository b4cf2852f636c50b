"""PolicyFile: rules, groups and method in a TOML or JSON file (docs/cli.md, "Policy files")."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blobstore.errors import BlobStoreError, DocumentError, LimitExceededError
from blobstore.importer.policies.rules import Rule
from blobstore.kernels import check_method
from blobstore.quant import Quantization, QuantType
from blobstore.ranges import FileReader
from blobstore.strictjson import parse_object

_LARGEST_FILE = 2**20
_MOST_RULES = 10_000
_MOST_DOTS = 64
_PART = rb"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_DOTTED = re.compile(rb"(?<![\w-])(?:%b){%d}" % (_PART, _MOST_DOTS), re.ASCII)
"""tomllib's time is quadratic in the dots of a key (CPython Lib/tomllib/_parser.py `key_value_rule`, `create_dict_rule`)."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    quant: str | None = None
    method: str | None = None
    groups: dict[str, int] = Field(default_factory=dict)
    rules: Annotated[list[str], Field(max_length=_MOST_RULES)] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """What a policy file says; None where it says nothing. ``groups``: the group size to use for each type."""

    quant: str | None = None
    method: str | None = None
    groups: Mapping[QuantType, int] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PolicyFile:
        """Return what the file says: JSON when its name ends in .json, else TOML.

        Raises: NotFoundError, StorageError; LimitExceededError for over 1 MiB; DocumentError (rule O1) for what is no
        such document, an unknown key, or a value of the wrong kind, naming the key; UsageError for an unknown word.
        """
        with FileReader(path) as reader:
            if reader.size > _LARGEST_FILE:
                message = f"limit exceeded: {reader.name} has {reader.size:,} bytes, at most {_LARGEST_FILE:,} for a policy"
                raise LimitExceededError(message, path=reader.name)
            text = reader.read(0, reader.size)
        try:
            return cls._from(_validated(_parsed(text, reader.name), reader.name))
        except BlobStoreError as error:
            error.path = error.path or reader.name
            raise error if reader.name in error.message else error.at(reader.name) from None

    @classmethod
    def _from(cls, document: _Document) -> PolicyFile:
        groups = {QuantType.parse(kind): size for kind, size in document.groups.items()}
        for kind, size in groups.items():
            Quantization(kind, size)
        if document.method is not None:
            check_method(document.method)
        if document.quant not in (None, "none"):
            QuantType.parse(str(document.quant))
        return cls(document.quant, document.method, groups, tuple(map(Rule.parse, document.rules)))


def _parsed(text: bytes, name: str) -> dict[str, Any]:
    if name.endswith(".json"):
        return parse_object(text, name, rule="O1")
    if _DOTTED.search(text):
        message = f"limit exceeded: {name} has a dotted key of {_MOST_DOTS:,} parts or more"
        raise LimitExceededError(message, path=name)
    try:
        return tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:  # an integer of 4,301 digits is a ValueError, too
        raise DocumentError(f"{name} is not a TOML document: {error} (rule O1)", rule="O1", path=name) from None


def _validated(value: dict[str, Any], name: str) -> _Document:
    try:
        return _Document.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DocumentError(f"{name}: {place}: {first['msg']} (rule O1)", rule="O1", path=name) from None
