"""What one process does of an experiment: where, how much of it, and by which random choices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from support.lab.file_systems import MEMORY, FileSystem

_Item = TypeVar("_Item")
_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class Task:
    """An experiment's ``folder`` on a ``file_system``, and ``part`` of ``parts`` of its faults.

    ``count`` None is the long form. ``seed``: another one makes other random choices; every part
    makes its own.
    """

    folder: Path
    count: int | None
    seed: int
    part: int = 0
    parts: int = 1
    file_system: FileSystem = MEMORY

    @property
    def is_first(self) -> bool:
        """True for one part: controls are for the experiment as a whole."""
        return self.part == 0

    @property
    def is_long(self) -> bool:
        """True for the long form."""
        return self.count is None

    def moments(self) -> random.Random:
        """Return where this part's random choices come from."""
        return random.Random(self.seed + _STRIDE * self.part)

    def share(self, number: int) -> int:
        """Return how many of ``number`` things are for this part."""
        return number // self.parts + (self.part < number % self.parts)

    def pick(self, items: Sequence[_Item], *, of: float = 1) -> Sequence[_Item]:
        """Return this part's share of the items to try: ``count`` times ``of``, evenly spread.

        All in the long form.
        """
        return sample(items, None if self.count is None else round(self.count * of))[
            self.part :: self.parts
        ]


def sample(items: Sequence[_Item], count: int | None) -> Sequence[_Item]:
    """Return ``count`` of the items, evenly spread, with the first and the last; None: all."""
    if count is None or len(items) <= count:
        return items
    return [items[round(index * (len(items) - 1) / max(count - 1, 1))] for index in range(count)]
