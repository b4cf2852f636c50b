"""What durability costs: imports as they are, in turn with the same whose syncs do nothing.

`python tests/bench/durability.py [--size GB] [--rounds N] [--work DIR]` makes a checkpoint and
prints a Markdown table: the wall time of whole processes with a warm page cache, each into an empty
store after a `sync`. Without syncs an import still writes, and around the page cache; what it does
not wait for is the disk's own cache and the journals of its files' names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from import_processes import run
from import_sources import FULL_SIZE_GB, Sources, warm
from machine import machine
from tables import show, spread, table

GOAL = 0.25
TYPES = (("none", ()), ("int4", ("--quant", "int4")), ("mxfp8", ("--quant", "mxfp8")))
MANY = 5_000
_AS_IT_IS = """
import os, sys
from blobstore.store.local import session
from blobstore.cli.main import main
"""
_WITHOUT_SYNCS = """
os.fsync = session.sync_file_system = lambda fd: None
"""


def seconds(source: Path, store: Path, options: Sequence[str], *, syncs: bool) -> float:
    """Return the time of one import into an empty store. Raises: SystemExit when it fails."""
    shutil.rmtree(store, ignore_errors=True)
    os.sync()
    warm(source)
    code = f"{_AS_IT_IS}{'' if syncs else _WITHOUT_SYNCS}main()"
    done = run(
        [
            sys.executable,
            "-c",
            code,
            "import",
            source,
            "bench",
            "--store",
            store,
            "--json",
            *options,
        ]
    )
    return done.checked().seconds


def compare(name: str, source: Path, store: Path, options: Sequence[str], rounds: int) -> None:
    """Print a row: both ways in turn."""
    durable, other = [], []
    for _ in range(rounds):
        durable.append(seconds(source, store, options, syncs=True))
        other.append(seconds(source, store, options, syncs=False))
    cost = statistics.median(durable) / statistics.median(other) - 1
    best = min(durable) / min(other) - 1
    show(
        (
            name,
            spread(durable),
            spread(other),
            f"{cost:+.0%}",
            f"{best:+.0%}",
            f"{GOAL:.0%}",
            "yes" if cost <= GOAL else "no",
        )
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=FULL_SIZE_GB, help="GB of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="imports of each side [default: 5]")
    parser.add_argument(
        "--work", type=Path, help="a folder on the disk to measure [default: a temporary one]"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="durability-", dir=arguments.work) as folder:
        print(machine(Path(folder)))
        print(
            f"\nDurability, seconds: best (median) of {arguments.rounds}; the cost is of the "
            "medians\n"
        )
        table("import", "as it is", "without syncs", "cost", "of the best", "goal", "reached")
        sources, store = Sources(Path(folder), arguments.size), Path(folder) / "store"
        for name, options in TYPES:
            compare(
                f"{arguments.size} GB, {name}", sources.shards(), store, options, arguments.rounds
            )
        compare(f"{MANY:,} tensors of 4 KB", sources.many(MANY), store, (), arguments.rounds)


if __name__ == "__main__":
    main()
