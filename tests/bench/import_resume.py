"""Imports that reuse blobs: after a kill, of an unchanged source, of fine-tunes of one model."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from import_processes import ENVIRONMENT, import_command, run, stored_bytes
from import_sources import Place, Sources, places, toggled, warm
from tables import show, table

TYPES = (("int4", ("--quant", "int4")), ("none", ()))
GOAL_SECOND = 0.6
GOAL_AGAIN_S = 0.25
GOAL_TUNES = 2.0
TUNES = 10
SHARE_CHANGED = 0.1


def resume(sources: Sources, arguments: argparse.Namespace) -> None:
    """Print the tables of the resume section."""
    store = sources.root / "store"
    killed_and_again(sources, store, arguments.rounds)
    fine_tunes(sources, store)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One import of each sort, seconds.

    ``at``: the share of the stored bytes that was there at the kill; ``left``: bytes in .blobstore
    after the second run; ``full_work``, ``second_work``: the processor's time, which other
    processes of the machine change less.
    """

    full: float
    killed_after: float
    at: float
    second: float
    again: float
    left: int
    equal: bool
    full_work: float
    second_work: float


def killed_and_again(sources: Sources, store: Path, rounds: int) -> None:
    """Print the times of second runs."""
    print(
        f"\nNever twice, seconds, best of {rounds}; every import is a process of its own. "
        "Killed with SIGKILL when half"
    )
    print(
        "of the stored bytes are there: `at` says how much was. `second` is the next import, "
        "`again` one of the finished"
    )
    print("model, unchanged; `left` is what .blobstore holds after the second.\n")
    headings = ("full", "killed after", "at", "second", "second / full", "goal", "reached")
    table(
        "type",
        *headings,
        "full, processor s",
        "second, processor s",
        "MB left",
        "again",
        "again / full",
        "goal",
        "reached",
        "digests",
    )
    for name, options in TYPES:
        try:
            show(
                (name, *cells_of([trial(sources.shards(), store, options) for _ in range(rounds)]))
            )
        except SystemExit as stopped:
            show((name, f"{stopped}"))


def cells_of(trials: Sequence[Trial]) -> list[str]:
    """Return a row of the table."""
    full, second, again = (
        min(getattr(one, name) for one in trials) for name in ("full", "second", "again")
    )
    return [
        f"{full:.2f}",
        f"{min(one.killed_after for one in trials):.2f}",
        f"{max(one.at for one in trials):.0%}",
        f"{second:.2f}",
        f"{second / full:.2f}",
        f"{GOAL_SECOND}",
        "yes" if second <= GOAL_SECOND * full else "no",
        f"{min(one.full_work for one in trials):.2f}",
        f"{min(one.second_work for one in trials):.2f}",
        f"{max(one.left for one in trials) / 1e6:.1f}",
        f"{again:.2f}",
        f"{again / full:.3f}",
        f"{GOAL_AGAIN_S} s",
        "yes" if again <= GOAL_AGAIN_S else "no",
        "equal" if all(one.equal for one in trials) else "DIFFERENT",
    ]


def trial(source: Path, store: Path, options: Sequence[str]) -> Trial:
    """Import, import again; in a new store import, kill, import.

    Raises: SystemExit with what went wrong.
    """
    command = import_command(source, store, *options)
    prepare(store, source)
    full = run(command)
    stored = full.document["stored_bytes"]
    again = run(command)
    prepare(store, source)
    killed_after, there = run_until(command, store, stored // 2)
    second = run(command)
    return Trial(
        full=full.seconds,
        killed_after=killed_after,
        at=there / stored,
        second=second.seconds,
        again=again.seconds,
        left=stored_bytes(store / ".blobstore"),
        equal=full.document["digest"] == again.document["digest"] == second.document["digest"],
        full_work=full.processor,
        second_work=second.processor,
    )


def prepare(store: Path, source: Path) -> None:
    """Leave no store, nothing to write back, and the source in the page cache."""
    shutil.rmtree(store, ignore_errors=True)
    os.sync()
    warm(source)


def run_until(command: Sequence[str | Path], store: Path, nbytes: int) -> tuple[float, int]:
    """Kill an import when its store has that many bytes.

    Return after how many seconds and at how many.

    Raises: SystemExit when it ends before.
    """
    started = time.perf_counter()
    silent = subprocess.DEVNULL
    with subprocess.Popen(
        [*map(str, command)], stdout=silent, stderr=silent, env=ENVIRONMENT
    ) as process:
        there = 0
        while there < nbytes and process.poll() is None:
            time.sleep(0.002)
            there = stored_bytes(store)
        process.kill()
        seconds = time.perf_counter() - started
    if process.returncode != -signal.SIGKILL:
        sys.exit(f"it ended with code {process.returncode} before it was killed")
    return seconds, there


def changed_part(folder: Path) -> list[Place]:
    """Return the tensors that fine-tunes change: the last ones, at most a tenth of the bytes."""
    found = {
        name: place for name, place in places(folder).items() if name.startswith("model.layers.")
    }
    left = SHARE_CHANGED * sum(place.nbytes for place in places(folder).values())
    chosen: list[Place] = []
    for _, place in sorted(
        found.items(), key=lambda item: (int(item[0].split(".")[2]), item[0]), reverse=True
    ):
        if place.nbytes <= left:
            chosen.append(place)
            left -= place.nbytes
    return chosen


def fine_tunes(sources: Sources, store: Path) -> None:
    """Print what ten fine-tunes of one model take on the disk."""
    print(
        f"\n{TUNES} fine-tunes that differ in the same tensors, of the last layers; GB on the "
        "disk of the whole store\n"
    )
    headings = (
        "bytes that differ",
        "one",
        "all",
        "all / one",
        "goal",
        "reached",
        "models",
        "first, s",
        "others, mean s",
    )
    table("type", *headings)
    folder = sources.root / "tunes"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sources.shards(), folder)
    for name, options in TYPES:
        shutil.rmtree(store, ignore_errors=True)
        try:
            show((name, *tuned(folder, store, options)))
        except SystemExit as stopped:
            show((name, f"{stopped}"))


def tuned(folder: Path, store: Path, options: Sequence[str]) -> list[str]:
    """Return a row of the table. Raises: SystemExit when an import fails."""
    everything, tensors = places(folder), changed_part(folder)
    share = sum(place.nbytes for place in tensors) / sum(
        place.nbytes for place in everything.values()
    )
    seconds, sizes, digests = [], [], set()
    for number in range(1, TUNES + 1):
        with toggled(tensors, number):
            os.sync()
            done = run(import_command(folder, store, *options, name=f"tune-{number}"))
        digests.add(done.document["digest"])
        seconds.append(done.seconds)
        sizes.append(stored_bytes(store))
    ratio = sizes[-1] / sizes[0]
    return [
        f"{share:.1%}",
        f"{sizes[0] / 1e9:.2f}",
        f"{sizes[-1] / 1e9:.2f}",
        f"{ratio:.2f}",
        f"{GOAL_TUNES}",
        "yes" if ratio <= GOAL_TUNES and len(digests) == TUNES else "no",
        f"{len(digests)} different",
        f"{seconds[0]:.2f}",
        f"{sum(seconds[1:]) / (TUNES - 1):.2f}",
    ]
