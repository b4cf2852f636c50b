"""Rules, policy files and importance: what a user says of single tensors.

A rule ``GLOB=TYPE`` or ``GLOB=TYPE/GROUP`` gives a type to output tensors. The last rule that
matches a name decides, whatever the policy says; ``none`` keeps the source's dtype. Rules do not
apply to tensors that can't be quantized: those of less than two dimensions, those without floats,
those whose rows are not a whole number of groups.

A model may have a hundred thousand tensors and a rule for each: whole names are looked up. Patterns
are tried one by one, so there may be a thousand.

A policy file has rules, groups and a method in TOML or JSON (docs/example-policy.toml).
Importance is what the error of each input column counts in a search, by source tensor.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Annotated, Any

from blobstore.errors import (
    BlobStoreError,
    DocumentError,
    LimitExceededError,
    UsageError,
    quoted,
)
from blobstore.formats.dtypes import DType, Quantization, QuantType
from blobstore.formats.safetensors.header import header_of
from blobstore.formats.strictjson import (
    Between,
    Document,
    InvalidError,
    check_of,
    parse_document,
    parse_object,
)
from blobstore.io.durable import read_own
from blobstore.io.ranges import FileReader
from blobstore.kernels.arrays import Array
from blobstore.kernels.scales import check_method, checked_importance
from blobstore.names import Digest

MAX_PATTERNS = 1_000
"""Rules that are tried on every name: 1,000 take 8 s for names of 450 KB together."""
_NONE = "none"
_SPECIAL = re.compile(r"[*?[]")
_ESCAPED = re.compile(r"\[([*?[])\]")


@dataclass(frozen=True, slots=True)
class Rule(Document):
    """One rule: a pattern in the shell's syntax, and a type, with a group size if it names one.

    The type None keeps the tensors.
    """

    pattern: str
    quant_type: QuantType | None
    group_size: int | None = None

    @classmethod
    def from_json(cls, value: Any) -> Rule:
        return cls.parse(check_of(str)(value))

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Return the rule that a user writes.

        Raises: UsageError for another form, an unknown type, an impossible group.
        """
        pattern, _, wanted = text.rpartition("=")
        if not pattern or not wanted:
            raise UsageError(
                f"invalid rule {text!r}", hint="Write GLOB=TYPE, such as '*.down_proj.weight=int8'."
            )
        if wanted.strip() == _NONE:
            return cls(pattern.strip(), None)
        kind, slash, size = wanted.strip().partition("/")
        try:
            quant_type = QuantType.parse(kind)
            group_size = Quantization.parse(kind, size or "0").group_size if slash else None
        except UsageError as error:
            raise error.at(f"the rule {text!r}") from None
        return cls(pattern.strip(), quant_type, group_size)

    @property
    def literal(self) -> str | None:
        """The only name that the pattern is like; None when it may be like several."""
        if _SPECIAL.search(_ESCAPED.sub("", self.pattern)):
            return None
        return _ESCAPED.sub(r"\1", self.pattern)

    def matches(self, names: Collection[str]) -> list[str]:
        if (name := self.literal) is not None:
            return [name] if name in names else []
        pattern = re.compile(translate(self.pattern))
        return [name for name in names if pattern.match(name)]

    def __str__(self) -> str:
        size = f"/{self.group_size}" if self.group_size is not None else ""
        return f"{self.pattern}={self.quant_type or _NONE}{size}"


def escape_name(name: str) -> str:
    """Return the pattern that is like ``name`` and no other."""
    return _SPECIAL.sub(r"[\g<0>]", name)


def parse_groups(groups: Mapping[str, Any]) -> dict[QuantType, int]:
    """Return group sizes by type. Raises: UsageError for those that a type does not have."""
    parsed = {QuantType.parse(kind): size for kind, size in groups.items()}
    for kind, size in parsed.items():
        Quantization(kind, size)
    return parsed


def check_count(rules: Iterable[Rule]) -> None:
    """Raise LimitExceededError when more than 1,000 of the rules would be tried on every name."""
    count = sum(rule.literal is None for rule in rules)
    if count > MAX_PATTERNS:
        raise LimitExceededError(
            f"limit exceeded: {count:,} rules with patterns, at most {MAX_PATTERNS:,}",
            hint="Rules with exact names do not count.",
        )


class RuleBook:
    """Rules in their order, made for many questions."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rules)
        self._literal: dict[str, int] = {}
        self._globs: list[tuple[int, re.Pattern[str]]] = []
        for number, rule in enumerate(self._rules):
            if (name := rule.literal) is not None:
                self._literal[name] = number
            else:
                # Compiled here: fnmatch remembers 256 patterns, and compiles each of more of them
                # again for every name.
                self._globs.append((number, re.compile(translate(rule.pattern))))
        self._globs.reverse()

    def rule_for(self, name: str) -> Rule | None:
        last = self._literal.get(name, -1)
        later = (number for number, pattern in self._globs if number > last and pattern.match(name))
        last = next(later, last)
        return self._rules[last] if last >= 0 else None


_LARGEST_FILE = 2**20
_MOST_DOTS = 64
_PART = rb"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
# tomllib's time is quadratic in the dots of a key.
#
# Source: CPython Lib/tomllib/_parser.py `key_value_rule`, `create_dict_rule`.
_DOTTED = re.compile(rb"(?<![\w-])(?:%b){%d}" % (_PART, _MOST_DOTS), re.ASCII)


@dataclass(frozen=True, slots=True)
class PolicyFile(Document):
    """What a policy file says; None where it says nothing.

    ``groups``: the group size to use for each type.
    """

    quant: str | None = None
    method: str | None = None
    groups: Mapping[QuantType, int] = field(default_factory=dict)
    rules: Annotated[list[Rule], Between(0, 10_000)] = field(default_factory=list)

    @classmethod
    def fields_of(cls, value: dict[str, Any]) -> dict[str, Any]:
        if others := [key for key in value if key not in cls.__slots__]:
            raise InvalidError("Extra inputs are not permitted", others[0])
        fields = super(PolicyFile, cls).fields_of(value)
        groups = parse_groups(fields.get("groups", {}))
        if fields.get("method") is not None:
            check_method(fields["method"])
        if fields.get("quant") not in (None, "none"):
            QuantType.parse(fields["quant"])
        return {**fields, "groups": groups}

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PolicyFile:
        """Return what the file says: JSON when its name ends in .json, else TOML.

        Raises: NotFoundError, StorageError; LimitExceededError for over 1 MiB; DocumentError (rule
        O1) for another kind of document, an unknown key, or a value of the wrong kind, naming the
        key; UsageError for an unknown word.
        """
        name = os.fspath(path)
        try:
            return parse_document(cls, read_settings(path, "O1"), name, "O1")
        except BlobStoreError as error:
            named = error.about(path=name)
            raise named if name in error.message else named.at(name) from None


def read_settings(path: str | os.PathLike[str], rule: str) -> dict[str, Any]:
    """Return the JSON object in a file, if its name ends in .json, else its TOML document.

    Raises: DocumentError with ``rule``; LimitExceededError for over 1 MiB; NotFoundError;
    StorageError.
    """
    text, name = read_own(path, _LARGEST_FILE, follow=True), os.fspath(path)
    if name.endswith(".json"):
        return parse_object(text, name, rule=rule)
    if _DOTTED.search(text):
        raise LimitExceededError(
            f"limit exceeded: {name} has a dotted key of {_MOST_DOTS:,} parts or more", path=name
        )
    import tomllib

    try:
        return tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:  # an integer of 4,301 digits is a ValueError, too
        raise DocumentError(
            f"{name} is not a TOML document: {error} (rule {rule})", rule=rule, path=name
        ) from None


_LARGEST_IMPORTANCE = 2**28


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """Vectors of finite float32 numbers >= 0, one a source tensor.

    ``digest`` is that of names and values.
    """

    vectors: Mapping[str, Array]
    digest: Digest

    @classmethod
    def parse(cls, given: str | os.PathLike[str] | Mapping[str, Any]) -> Importance:
        """Return the importance in a .safetensors file of F32 vectors, or in a mapping of arrays.

        Raises: UsageError when a value is not a vector of finite numbers >= 0, or a name not text;
        for a file also NotFoundError, HeaderError, LimitExceededError (a file of more than 256
        MiB), StorageError.
        """
        if not isinstance(given, Mapping | str | os.PathLike):
            raise UsageError(
                f"importance is a file or a mapping of vectors, not {type(given).__name__}"
            )
        arrays = given if isinstance(given, Mapping) else _read(given)
        for name in arrays:
            try:
                name.encode()
            except (AttributeError, UnicodeEncodeError):
                raise UsageError(
                    f"importance is given for {name!r}, which is not the name of a tensor"
                ) from None
        vectors = {
            name: checked_importance(array, None, f"the importance of {quoted(name)}")
            for name, array in sorted(arrays.items())
        }
        hashed = hashlib.sha256()
        for name, vector in vectors.items():
            for part in (name.encode(), vector.tobytes()):
                hashed.update(len(part).to_bytes(8, "little"))
                hashed.update(part)
        return cls(vectors, Digest.parse(f"sha256:{hashed.hexdigest()}"))

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UsageError unless each vector is for a tensor of ``shapes`` of as many columns."""
        for name, vector in self.vectors.items():
            if name not in shapes:
                raise UsageError(
                    f"importance is given for {quoted(name)}, which is not quantized",
                    hint="Name source tensors that the plan quantizes.",
                    tensor=name,
                )
            if vector.size != shapes[name][-1]:
                raise UsageError(
                    f"the importance of {quoted(name)} has {vector.size:,} values "
                    f"for {shapes[name][-1]:,} columns",
                    tensor=name,
                )


def _read(path: str | os.PathLike[str]) -> dict[str, Array]:
    with FileReader(path) as reader:
        if reader.size > _LARGEST_IMPORTANCE:
            raise LimitExceededError(
                f"limit exceeded: {reader.name} has {reader.size:,} bytes, at most"
                f" {_LARGEST_IMPORTANCE:,} for importance",
                path=reader.name,
            )
        header = header_of(reader)
        header.check_limits(reader.name)
        for name, entry in header.tensors.items():
            if entry.dtype is not DType.F32 or len(entry.shape) != 1:
                raise UsageError(
                    f"{reader.name}: {quoted(name)} is {entry.dtype} {list(entry.shape)}, "
                    "not one F32 vector",
                    tensor=name,
                    path=reader.name,
                )
        import numpy as np

        return {
            name: np.frombuffer(
                reader.read(header.data_start + entry.begin, entry.nbytes), np.float32
            )
            for name, entry in header.tensors.items()
        }
