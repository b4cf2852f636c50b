"""Memory and temporary files of an import, and how they grow with the number of tensors."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from import_processes import MemoryPeak, Run, TemporaryFiles, import_command, run
from import_sources import Sources, warm
from retired import retire
from tables import show, table

MB = 1e6
GOAL_MB = 150
GOAL_SCALE_MB = 250
GOAL_SCALE_S = 15
TYPES = (("int4", ("--quant", "int4")), ("none", ()))
COUNTS = (25_000, 50_000, 100_000)


def observed(
    source: Path, store: Path, options: Sequence[str]
) -> tuple[Run, MemoryPeak, TemporaryFiles]:
    """Import with two threads and look every 5 ms. The store is left there."""
    peak, files = MemoryPeak(), TemporaryFiles(store)

    def look(pid: int) -> None:
        peak(pid)
        files(pid)

    return run(import_command(source, store, "--jobs", "2", *options), look), peak, files


def memory(sources: Sources, arguments: argparse.Namespace) -> None:
    """Print the table of the memory section."""
    store = sources.root / "store"
    cases = (
        ("folder in shards", sources.shards(), ()),
        ("one tensor of 2 GB", sources.one_tensor(), ()),
        ("expert group of 3 GB, packed", sources.mixture(), ("--experts", "packed")),
        ("expert group of 3 GB, stacked", sources.mixture(), ("--experts", "stacked")),
    )
    print(
        "\nMemory with --jobs 2, MB: the largest anonymous memory (RssAnon + RssShmem) of "
        "samples 5 ms apart; `bound` is the"
    )
    print(
        "largest VmHWM - RssFile, which can only be too high. Temporary files: those in "
        ".blobstore, and unlinked ones.\n"
    )
    table(
        "type",
        "checkpoint",
        "peak",
        "bound",
        "goal",
        "reached",
        "most files",
        "their bytes",
        "/ stored bytes",
        "files left",
        "samples",
    )
    peaks: dict[str, list[int]] = {name: [] for name, _ in TYPES}
    for name, options in TYPES:
        for what, source, extra in cases:
            retire(store)
            os.sync()
            warm(source)
            done, peak, files = observed(source, store, [*options, *extra])
            if done.problem is not None:
                show((name, what, done.problem))
                continue
            peaks[name].append(peak.anonymous)
            stored = done.document["stored_bytes"]
            show(
                (
                    name,
                    what,
                    f"{peak.anonymous / MB:.0f}",
                    f"{peak.bound / MB:.0f}",
                    f"{GOAL_MB}",
                    "yes" if peak.anonymous <= GOAL_MB * MB else "no",
                    f"{files.files}",
                    f"{files.nbytes / MB:.0f}",
                    f"{files.nbytes / stored:.2f}",
                    f"{files.left()}",
                    f"{peak.samples}",
                )
            )
    print()
    for name, found in peaks.items():
        if found:
            apart = max(found) / min(found) - 1
            reached = "reached" if apart <= 0.1 else "not reached"
            print(f"{name}: {apart:.1%} between the least and the most; goal 10 %, {reached}")


def scale(sources: Sources, arguments: argparse.Namespace) -> None:
    """Print the table of the scale section."""
    store = sources.root / "store"
    print(
        "\nTensors of 4 KB in one file; `linear` is the time a tensor, relative to that of "
        "the fewest\n"
    )
    table(
        "type",
        "tensors",
        "seconds",
        "goal",
        "reached",
        "ms a tensor",
        "linear",
        "peak MB",
        "goal",
        "reached",
    )
    for name, options in TYPES:
        first: float | None = None
        for count in (int(sources.scale * count) for count in COUNTS):
            source = sources.many(count)
            retire(store)
            os.sync()
            warm(source)
            peak = MemoryPeak()
            done = run(import_command(source, store, *options), peak, 0.01)
            if done.problem is not None:
                show((name, f"{count:,}", f"{done.seconds:.1f}: {done.problem}"))
                continue
            each = done.seconds / count
            first = first or each
            show(
                (
                    name,
                    f"{count:,}",
                    f"{done.seconds:.1f}",
                    f"{GOAL_SCALE_S}",
                    "yes" if done.seconds <= GOAL_SCALE_S else "no",
                    f"{1e3 * each:.3f}",
                    f"{each / first:.2f}",
                    f"{peak.anonymous / MB:.0f}",
                    f"{GOAL_SCALE_MB}",
                    "yes" if peak.anonymous <= GOAL_SCALE_MB * MB else "no",
                )
            )
