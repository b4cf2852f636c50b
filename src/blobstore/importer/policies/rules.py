"""Rules: which type a user wants for tensors of certain names. Pure.

``GLOB=TYPE`` or ``GLOB=TYPE/GROUP``: the last rule whose pattern is like an output tensor's name decides its type, whatever
the policy says; ``none`` keeps the source's dtype. A rule says nothing about tensors that can't be quantized at all: those
of less than two dimensions, those without floats, those whose rows are not a whole number of groups.

A model may have a hundred thousand tensors, and a rule for each: whole names, and patterns that are the beginning of names
(``PREFIX.*``), are looked up and not tried one by one. Other patterns are: so there may be a thousand of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate

from blobstore.errors import LimitExceededError, UsageError
from blobstore.quant import Quantization, QuantType

MAX_PATTERNS = 1_000
"""Rules that are tried on every name: 1,000 take 8 s for names of 450 KB together."""
_NONE = "none"
_MAX_DIGITS = 9
_SPECIAL = re.compile(r"[*?[]")
_ESCAPED = re.compile(r"\[([*?[])\]")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: a pattern in the shell's syntax, and a type (None: none) with the group size that it names, if any."""

    pattern: str
    quant_type: QuantType | None
    group_size: int | None = None

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Return the rule that a user writes. Raises: UsageError for another form, an unknown type, an impossible group."""
        pattern, equals, wanted = text.rpartition("=")
        if not equals or not pattern or not wanted:
            raise UsageError(f"no rule: {text!r}", hint="Write GLOB=TYPE, such as '*.down_proj.weight=int8'.")
        try:
            return cls(pattern.strip(), *_type_and_group(wanted.strip()))
        except UsageError as error:
            raise error.at(f"the rule {text!r}") from None

    @classmethod
    def of(cls, pattern: str, quantization: Quantization | None) -> Rule:
        """Return the rule that gives names like ``pattern`` that quantization; None keeps them."""
        return cls(pattern, None) if quantization is None else cls(pattern, quantization.quant_type, quantization.group_size)

    @property
    def literal(self) -> str | None:
        """The only name that the pattern is like; None when it may be like several."""
        return _name(self.pattern)

    @property
    def prefix(self) -> str | None:
        """What all names begin with that the pattern ``PREFIX.*`` is like, the dot included; None for other patterns."""
        return _name(self.pattern[:-1]) if self.pattern.endswith(".*") else None

    def matches(self, name: str) -> bool:
        """Return True when the pattern is like that output name."""
        return fnmatchcase(name, self.pattern)

    def __str__(self) -> str:
        size = f"/{self.group_size}" if self.group_size is not None else ""
        return f"{self.pattern}={self.quant_type or _NONE}{size}"


def _name(pattern: str) -> str | None:
    """Return the only name that a pattern is like, or None."""
    return None if _SPECIAL.search(_ESCAPED.sub("", pattern)) else _ESCAPED.sub(r"\1", pattern)


def escaped(name: str) -> str:
    """Return the pattern that is like ``name`` and no other."""
    return _SPECIAL.sub(r"[\g<0>]", name)


def check_count(rules: Iterable[Rule]) -> None:
    """Raise LimitExceededError when more than 1,000 of the rules would be tried on every name."""
    count = sum(rule.literal is None and rule.prefix is None for rule in rules)
    if count > MAX_PATTERNS:
        raise LimitExceededError(
            f"limit exceeded: {count:,} rules with patterns, at most {MAX_PATTERNS:,}",
            hint="Whole names, and patterns that end in .* and have no other wildcard, are not counted.",
        )


class RuleBook:
    """Rules in their order, made for many questions."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rules)
        self._literal: dict[str, int] = {}
        self._prefixes: dict[str, int] = {}
        self._globs: list[tuple[int, re.Pattern[str]]] = []
        for number, rule in enumerate(self._rules):
            if (name := rule.literal) is not None:
                self._literal[name] = number
            elif (prefix := rule.prefix) is not None:
                self._prefixes[prefix] = number
            else:
                # Compiled here: fnmatch remembers 256 patterns, and compiles each of more of them again for every name.
                self._globs.append((number, re.compile(translate(rule.pattern))))
        self._globs.reverse()

    def rule_for(self, name: str) -> Rule | None:
        """Return the last rule that matches an output name, or None."""
        last = self._literal.get(name, -1)
        if self._prefixes:
            ends = (end + 1 for end, character in enumerate(name) if character == ".")
            last = max(last, max((self._prefixes.get(name[:end], -1) for end in ends), default=-1))
        later = (number for number, pattern in self._globs if number > last and pattern.match(name))
        last = next(later, last)
        return self._rules[last] if last >= 0 else None


class NameIndex:
    """Names, to find those that a rule is for."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)
        self._known = frozenset(self._names)

    def matching(self, rule: Rule) -> list[str]:
        """Return the names that the rule's pattern is like, sorted."""
        if (name := rule.literal) is not None:
            return [name] if name in self._known else []
        if (prefix := rule.prefix) is not None:
            first = last = bisect_left(self._names, prefix)
            while last < len(self._names) and self._names[last].startswith(prefix):
                last += 1
            return self._names[first:last]
        pattern = re.compile(translate(rule.pattern))
        return [name for name in self._names if pattern.match(name)]


def _type_and_group(text: str) -> tuple[QuantType | None, int | None]:
    kind, slash, size = text.partition("/")
    if kind == _NONE:
        if slash:
            raise UsageError("a tensor that is kept has no groups", hint="Write GLOB=none.")
        return None, None
    quant_type = QuantType.parse(kind)
    if not slash:
        return quant_type, None
    if not (size.isascii() and size.isdigit() and len(size) <= _MAX_DIGITS):
        raise UsageError(f"invalid group size: {size!r}")
    return quant_type, Quantization(quant_type, int(size)).group_size
