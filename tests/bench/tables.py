"""Markdown tables, printed row by row."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def show(cells: Iterable[str]) -> None:
    """Print one row of a Markdown table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def table(*headings: str) -> None:
    """Print the head of a Markdown table."""
    show(headings)
    show("---" for _ in headings)


def spread(seconds: Sequence[float]) -> str:
    """Return the best and the median."""
    return f"{min(seconds):.2f} ({statistics.median(seconds):.2f})"


def yes(is_reached: bool) -> str:
    """Return how a table says whether a goal is reached."""
    return "yes" if is_reached else "no"
