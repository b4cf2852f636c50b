"""Imports that have little to do: of a tiny model, and of an unchanged source."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from import_processes import Run, import_command, run
from import_sources import FIXTURE, Sources, warm
from retired import retire
from tables import show, spread, table, yes

RUNS = 10
GOAL_TINY_S = 0.20
GOAL_UNCHANGED_S = 0.25
TYPES = (("int4", ("--quant", "int4")), ("none", ()))


def start(sources: Sources, arguments: argparse.Namespace) -> None:
    """Print the table of the start section."""
    print(
        f"\nStart, seconds of whole processes: best (median) of {RUNS}. `tiny` is "
        f"{FIXTURE.name}, into a new store; `unchanged` is the folder,\nwhich the store has "
        "already.\n"
    )
    table("import", "type", "seconds", "processor seconds", "goal", "reached")
    store = sources.root / "store"
    for name, options in TYPES:
        row("tiny", name, GOAL_TINY_S, repeated(FIXTURE, store, options, is_new=True))
    for name, options in TYPES:
        retire(store)
        source = sources.shards()
        run(import_command(source, store, *options)).checked()
        row("unchanged", name, GOAL_UNCHANGED_S, repeated(source, store, options, is_new=False))


def repeated(source: Path, store: Path, options: Sequence[str], *, is_new: bool) -> list[Run]:
    """Import RUNS times, each into a new store, or into the one that is there."""
    done = []
    warm(source)
    for _ in range(RUNS):
        if is_new:
            retire(store)
        os.sync()
        done.append(run(import_command(source, store, *options)).checked())
    return done


def row(what: str, name: str, goal_s: float, done: Sequence[Run]) -> None:
    """Print one row; the best run counts."""
    seconds = [one.seconds for one in done]
    show(
        (
            what,
            name,
            spread(seconds),
            spread([one.processor for one in done]),
            f"{goal_s:.2f}",
            yes(min(seconds) <= goal_s),
        )
    )
