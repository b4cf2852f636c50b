"""Verdict: what a runtime says about a model."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Runs(enum.Enum):
    """Whether a model runs; UNKNOWN if it may not load, or may answer wrongly."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a model runs in a runtime of that version, and why: for YES what it runs as, else what is in the way."""

    runtime: str
    version: str
    runs: Runs
    reason: str

    def document(self) -> dict[str, str]:
        """Return the verdict for a JSON document."""
        return {"runtime": self.runtime, "version": self.version, "runs": self.runs.value, "reason": self.reason}

    @property
    def sentence(self) -> str:
        """The verdict as a sentence without its full stop."""
        runtime = f"{self.runtime} {self.version}"
        if self.runs is Runs.YES:
            return f"Runs in {runtime} ({self.reason})"
        return f"{'Does not run' if self.runs is Runs.NO else 'Uncertain'} in {runtime}: {self.reason}"

    def __str__(self) -> str:
        """Return the verdict as the answer to "runs in RUNTIME?"."""
        return f"{self.runs.value}: {self.reason} ({self.version})"


def in_one_line(verdicts: Iterable[Verdict]) -> str:
    """Return the sentences of several verdicts as one."""
    first, *others = [verdict.sentence for verdict in verdicts]
    return "; ".join([first, *(sentence[0].lower() + sentence[1:] for sentence in others)])
