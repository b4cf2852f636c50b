"""Rules: which type a user wants for tensors of certain names. Pure.

``GLOB=TYPE`` or ``GLOB=TYPE/GROUP``: the last rule whose pattern is like an output tensor's name decides its type, whatever
the policy says; ``none`` keeps the source's dtype. A rule says nothing about tensors that can't be quantized at all: those
of less than two dimensions, those that hold no floats, those whose rows are no whole number of groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from blobstore.errors import UsageError
from blobstore.quant import Quantization, QuantType

_NONE = "none"


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
        kind, slash, size = wanted.partition("/")
        if kind == _NONE and not slash:
            return cls(pattern, None)
        quant_type = QuantType.parse(kind)
        if not slash:
            return cls(pattern, quant_type)
        if not (size.isascii() and size.isdigit() and len(size) < 10):  # noqa: PLR2004
            raise UsageError(f"no group size: {size!r} in the rule {text!r}")
        return cls(pattern, quant_type, Quantization(quant_type, int(size)).group_size)

    def matches(self, name: str) -> bool:
        """Return True when the pattern is like that output name."""
        return fnmatchcase(name, self.pattern)

    def __str__(self) -> str:
        size = f"/{self.group_size}" if self.group_size is not None else ""
        return f"{self.pattern}={self.quant_type or _NONE}{size}"


def rule_for(name: str, rules: Iterable[Rule]) -> Rule | None:
    """Return the last rule that matches an output name, or None."""
    return next((rule for rule in reversed(tuple(rules)) if rule.matches(name)), None)
