"""Exports from outside: how fast, against `cp` of the same bytes, and in how much memory.

`python tests/bench/export.py [--size GB] [--rounds N]` makes a Qwen3-like folder under --work
(default: a temporary folder; five times the size), imports it unquantized and as int4, and prints a
Markdown table: whole processes with a warm page cache, in turn, each into a place that is empty
after a `sync`; ours durable, `cp` with and without a `sync` after it. A ratio compares the best
times: of exports of the source's bytes to `cp` with `sync`, of int4's to the plain export of int4.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from import_processes import MemoryPeak, Run, blobstore_command, import_command, run
from import_sources import Sources, warm
from tables import show, table

SYNCED = "`cp -r` of the source, `sync`"
PLAIN = "`export` of int4"


@dataclass(frozen=True, slots=True, order=True)
class Timed:
    """A run: its seconds, those of the processor, and what it printed."""

    seconds: float
    processor_s: float
    run: Run = field(compare=False)


def processor_s() -> float:
    """Return the processor time of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fresh(
    command: Sequence[str | Path], source: Path, target: Path, peak: MemoryPeak | None = None
) -> Timed:
    """Run a command that fills ``target``, which is not there before and after.

    The source is in the page cache.
    """
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    warm(source)
    before = processor_s()
    done = run(command, peak)
    used = processor_s() - before
    nbytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    shutil.rmtree(target, ignore_errors=True)
    if done.problem is not None or not nbytes:
        raise SystemExit(done.problem or "nothing was written")
    return Timed(done.seconds, used, done)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=1.85, help="gigabytes of the folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="blobstore-export-", dir=arguments.work) as work:
        measure(Path(work), arguments.size, arguments.rounds)


def measure(work: Path, size: float, rounds: int) -> None:
    """Make the models, and run every command in turn."""
    source = Sources(work / "sources", size).shards()
    store, target = work / "store", work / "target"
    for options in ((), ("--quant", "int4")):
        done = run(
            import_command(
                source, store, *options, name=f"bench:{options[-1] if options else 'none'}"
            )
        )
        if done.problem is not None:
            raise SystemExit(done.problem)
    ours = ("export", Path("bench:none"), target, "--store", store)
    commands: dict[str, Sequence[str | Path]] = {
        "`cp -r` of the source": ["cp", "-r", source, target],
        SYNCED: ["sh", "-c", 'cp -r "$0" "$1" && sync', source, target],
        "`export`": blobstore_command(*ours),
        "`export --jobs 1`": blobstore_command(*ours, "--jobs", "1"),
        "`export --max-shard-size 200MB`": blobstore_command(*ours, "--max-shard-size", "200MB"),
        PLAIN: blobstore_command("export", Path("bench:int4"), target, "--store", store),
        "`export` of int4 `--dequantize bfloat16`": blobstore_command(
            "export", Path("bench:int4"), target, "--dequantize", "bfloat16", "--store", store
        ),
        "`export` of int4 `--format mlx`": blobstore_command(
            "export", Path("bench:int4"), target, "--format", "mlx", "--store", store
        ),
    }
    times: dict[str, list[Timed]] = {name: [] for name in commands}
    peaks = {name: MemoryPeak() for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            place = source if "cp" in name else store / "blobs"
            times[name].append(fresh(command, place, target, peaks[name]))
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    print(f"\n{nbytes / 1e9:.2f} GB, best of {rounds}\n")
    table("command", "s", "ratio", "processor, s", "written, GB", "anonymous memory, MB")
    for name, runs in times.items():
        best, is_ours = min(runs), "export" in name
        said = best.run.document["bytes"] if is_ours else nbytes
        peer = PLAIN if "int4" in name else SYNCED
        show(
            (
                name,
                f"{best.seconds:.2f}",
                f"{best.seconds / min(times[peer]).seconds:.2f}",
                f"{min(one.processor_s for one in runs):.2f}",
                f"{said / 1e9:.2f}",
                f"{peaks[name].anonymous / 1e6:.0f}" if is_ours else "-",
            )
        )


if __name__ == "__main__":
    main()
