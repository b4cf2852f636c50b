"""What an experiment counted, and what went wrong: one line at the end, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterable

_SHOWN = 20
_BLIND = "blind"


class NotShownError(Exception):
    """This machine can't show the fault: a tool, a right or a kernel is missing."""


class Figures:
    """Counts in the order in which they were first named; those of ``zero`` must stay 0.

    ``quiet``: what is wrong is not said. That is for controls: the same experiment on code that is
    broken on purpose, which has to see that (`control`).
    """

    def __init__(self, *counted: str, zero: Iterable[str], quiet: bool = False) -> None:
        self._zero = (*zero, *([] if quiet else [_BLIND]))
        self.is_quiet = quiet
        self.counts = dict.fromkeys((*counted, *self._zero), 0)
        self._largest: set[str] = set()

    def add(self, name: str, number: int = 1) -> None:
        """Count something."""
        self.counts[name] = self.counts.get(name, 0) + number

    def most(self, name: str, number: int) -> None:
        """Keep the largest number, for figures that differ or are equal in all parts."""
        self._largest.add(name)
        self.counts[name] = max(self.counts.get(name, 0), number)

    def wrong(self, name: str, what: object) -> None:
        """Count something that must not be, and say what it was."""
        self.add(name)
        if self.counts[name] <= _SHOWN and not self.is_quiet:
            sys.stderr.write(f"{name}: {what}\n")

    def expect(self, holds: bool, name: str, what: object) -> None:
        """Count as `wrong` what does not hold."""
        if not holds:
            self.wrong(name, what)

    def control(self, found: Figures) -> None:
        """Count how much a control saw that must not be; it is blind when that is nothing."""
        seen = sum(found.counts[name] for name in found._zero)
        self.add("seen in controls", seen)
        self.expect(seen > 0, _BLIND, found)

    def include(self, part: Figures) -> None:
        """Count what another part of the same experiment counted."""
        for name, number in part.counts.items():
            self.most(name, number) if name in part._largest else self.add(name, number)

    @property
    def is_good(self) -> bool:
        """True when nothing is counted that must not be."""
        return not any(self.counts[name] for name in self._zero)

    def __str__(self) -> str:
        return " · ".join(f"{name} {number:,}" for name, number in self.counts.items())
