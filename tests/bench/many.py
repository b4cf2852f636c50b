"""Imports by many processes: what handing out tasks costs.

`python tests/bench/many.py overhead [--work DIR] [--runs N] [--size GB]` imports a checkpoint of
1.88 GB to int4 with the threads of one process, with `work` and `commit`, and by the workers of a
Dask cluster on this machine with as many threads in all, alternating, each into an empty store
after a `sync`. Clusters are started before the clock. It prints seconds by the clock, and their
ratio to the threads of one process.

`python tests/bench/many.py workers [--work DIR]` runs `work` in 1, 2 and 4 processes, each on
a core of its own, beside what docs/guides/cluster.md computes.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distributed import Client, LocalCluster
from machine import machine
from sources import FULL_SIZE_GB, Sources, warm
from tables import show, spread, table

import blobstore
from blobstore import distributed as on_dask
from blobstore.store.local.store import Store

_THREADS = 4


@contextmanager
def cluster(processes: int) -> Iterator[Client]:
    """Start a cluster of this machine with four threads in all."""
    with (
        LocalCluster(
            n_workers=processes,
            threads_per_worker=_THREADS // processes,
            dashboard_address=None,
            memory_limit="2GB",
        ) as found,
        Client(found) as client,
    ):
        yield client


def contests(source: Path, work: Path, stack: ExitStack) -> dict[str, Callable[[Store], str]]:
    """Return the ways to import ``source``, each with what it gives: the model's digest."""

    def threads(store: Store) -> str:
        return str(
            blobstore.import_model(source, "m", store=store, jobs=_THREADS, quant="int4").digest
        )

    def worked(store: Store) -> str:
        plan = work / "plan.json"
        shutil.rmtree(f"{plan}.receipts", ignore_errors=True)
        blobstore.write_plan(blobstore.plan_import(source, quant="int4"), plan)
        blobstore.work_on_plan(plan, store=store, jobs=_THREADS)
        return str(blobstore.commit_plan(plan, "m", store=store).digest)

    def on(client: Client) -> Callable[[Store], str]:
        return lambda store: str(
            on_dask.import_model(source, "m", client=client, store=store, quant="int4").digest
        )

    found: dict[str, Callable[[Store], str]] = {
        "threads of one process": threads,
        "work and commit": worked,
    }
    for processes in (1, 2, 4):
        client = stack.enter_context(cluster(processes))
        found[f"Dask, {processes} x {_THREADS // processes} threads"] = on(client)
    return found


def overhead(work: Path, runs: int, size_gb: float) -> None:
    """Print the table of one import in several ways."""
    source = Sources(work, size_gb).shards()
    with ExitStack() as stack:
        ways = contests(source, work, stack)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        digests = set()
        for run in range(runs + 1):  # the first loads modules on the workers
            for name, way in ways.items():
                store = blobstore.open_store(work / "store")
                shutil.rmtree(store.root, ignore_errors=True)
                warm(source)
                started = time.monotonic()
                digests.add(way(store))
                if run:
                    seconds[name].append(time.monotonic() - started)
        shutil.rmtree(store.root, ignore_errors=True)
    assert len(digests) == 1
    base = statistics.median(seconds["threads of one process"])
    table("way", "seconds: best (median)", "ratio of bests", "ratio of medians")
    best = min(seconds["threads of one process"])
    for name, took in seconds.items():
        ratios = min(took) / best, statistics.median(took) / base
        show([name, spread(took), *(f"{ratio:.2f}" for ratio in ratios)])


def pinned(core: int) -> list[str]:
    """Return a command that runs another on one core: a worker with spare threads takes more."""
    return ["taskset", "-c", str(core)]


def workers(work: Path, runs: int, size_gb: float) -> None:
    """Print how long one to four workers of one core take, and what the model of time says."""
    source = Sources(work, size_gb).shards()
    plan, store = work / "plan.json", work / "store"
    blobstore.write_plan(blobstore.plan_import(source, quant="int4"), plan)
    command = [sys.executable, "-m", "blobstore", "work", str(plan), "--store", str(store)]
    table("workers", "with start, s", "slowest worker's work, s", "model, s", "commit, s")
    first = 0.0
    for count in (1, 2, 4):
        took, slowest, commits = [], [], []
        for _ in range(runs):
            shutil.rmtree(f"{plan}.receipts", ignore_errors=True)
            shutil.rmtree(store, ignore_errors=True)
            warm(source)
            started = time.monotonic()
            processes = [
                subprocess.Popen(
                    [*pinned(n), *command, "--jobs", "1", "--shard", f"{n}/{count}", "--json"],
                    stdout=subprocess.PIPE,
                )
                for n in range(count)
            ]
            reports = [json.loads(process.communicate()[0]) for process in processes]
            worked = time.monotonic()
            blobstore.commit_plan(plan, "m", store=blobstore.open_store(store))
            took.append(worked - started)
            slowest.append(max(report["seconds"] for report in reports))
            commits.append(time.monotonic() - worked)
        first = first or min(slowest)
        model = f"{first / count:.2f}"
        show([str(count), spread(took), spread(slowest), model, f"{min(commits):.2f}"])
    shutil.rmtree(store)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=["overhead", "workers"])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--size", type=float, default=FULL_SIZE_GB)
    given = parser.parse_args()
    gc.set_threshold(200_000)  # as the command line does
    with tempfile.TemporaryDirectory(dir=given.work) as temporary:
        folder = given.work or Path(temporary)
        print(machine(folder, ("distributed", "numpy")))
        if given.section == "overhead":
            overhead(folder, given.runs, given.size)
        else:
            workers(folder, given.runs, given.size)
    print(
        f"memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB"
    )


if __name__ == "__main__":
    main()
