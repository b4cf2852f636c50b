"""Imports from outside: how fast, in how much memory, how often twice, how many tensors.

`python tests/bench/imports.py [speed] [memory] [resume] [scale]` makes its checkpoints under --work
(default: a temporary folder; 15 GB), runs `python -m blobstore import` in processes of its own, and
prints Markdown tables; without a name all sections. Goals are for the full size and an idle
machine: --size 0.3 tries the sections out.

Speed is the wall time of whole processes with a warm page cache, alternating with the peer's, each
into an empty place after a `sync`: ours durable as it is, theirs (mlx_lm convert; cp, sync and
sha256sum one after the other) as they are.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from import_limits import LIMITS, best_of, measure_all, processor, slowest, work_of
from import_memory import memory, scale
from import_processes import Run, import_command, run
from import_resume import resume
from import_sources import FULL_SIZE_GB, Sources, warm
from search import show, table

import blobstore
from blobstore import kernels


@dataclass(frozen=True, slots=True)
class Contest:
    """One type: our options, the peer's, and what part of the peer's time is the goal."""

    name: str
    ours: tuple[str, ...]
    peer: tuple[str, ...]
    goal: float
    slow: bool = False

    @property
    def peer_name(self) -> str:
        """What the table says."""
        return f"mlx_lm convert {' '.join(self.peer)}" if self.peer else "cp; sync; sha256sum"


CONTESTS = (
    Contest(
        "int4",
        ("--quant", "int4", "--group-size", "32"),
        ("-q", "--q-bits", "4", "--q-group-size", "32"),
        1 / 4,
    ),
    Contest("mxfp8", ("--quant", "mxfp8"), ("-q", "--q-mode", "mxfp8"), 1 / 5),
    Contest("nvfp4", ("--quant", "nvfp4"), ("-q", "--q-mode", "nvfp4"), 1 / 50, slow=True),
    Contest("none", (), (), 0.8),
)


def peer_command(contest: Contest, source: Path, target: Path) -> list[str | Path]:
    """Return the line that runs the peer."""
    if contest.peer:
        return [
            sys.executable,
            "-m",
            "mlx_lm",
            "convert",
            "--hf-path",
            source,
            "--mlx-path",
            target,
            *contest.peer,
        ]
    return ["sh", "-c", 'cp -r "$0" "$1" && sync && sha256sum "$1"/*', source, target]


def fresh(command: Callable[[Path], Sequence[str | Path]], source: Path, target: Path) -> Run:
    """Run a command that fills ``target``, which is not there before and after.

    The source is in the page cache.
    """
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    warm(source)
    done = run(command(target))
    shutil.rmtree(target, ignore_errors=True)
    return done


@dataclass(frozen=True, slots=True)
class Sides:
    """The times of one contest, seconds."""

    contest: Contest
    ours: list[float]
    peer: list[float]
    limits: list[dict[str, float]]


def contend(contest: Contest, sources: Sources, arguments: argparse.Namespace) -> Sides:
    """Run both sides in turn, and each limit after them. Raises: SystemExit when a side fails."""
    source, target = sources.shards(), sources.root / "target"
    sides = Sides(contest, [], [], [])
    work = work_of(source, *contest.ours)
    for number in range(arguments.rounds):
        sides.ours.append(
            seconds_of(fresh(lambda to: import_command(source, to, *contest.ours), source, target))
        )
        if number < (arguments.slow_rounds if contest.slow else arguments.rounds):
            sides.peer.append(
                seconds_of(fresh(lambda to: peer_command(contest, source, to), source, target))
            )
        os.sync()
        warm(source)
        sides.limits.append(measure_all(source, work, sources.weights, target))
    return sides


def seconds_of(done: Run) -> float:
    """Return the time of a run that went well. Raises: SystemExit."""
    if done.problem is not None:
        sys.exit(done.problem)
    return done.seconds


def speed(sources: Sources, arguments: argparse.Namespace) -> None:
    """Print both tables of the speed section."""
    chosen = [contest for contest in CONTESTS if contest.name in arguments.types]
    print(
        f"\nSpeed, seconds: best (median) of {arguments.rounds}; nvfp4's peer of "
        f"{arguments.slow_rounds}\n"
    )
    table("type", "ours", "peer", "peer's seconds", "ratio of the best", "goal", "reached")
    done: list[Sides] = []
    for contest in chosen:
        sides = contend(contest, sources, arguments)
        done.append(sides)
        ratio = min(sides.ours) / min(sides.peer)
        reached = "yes" if ratio <= contest.goal else "no"
        show(
            (
                contest.name,
                spread(sides.ours),
                contest.peer_name,
                spread(sides.peer),
                f"{ratio:.3f}",
                f"{contest.goal:.3g}",
                reached,
            )
        )
    print(
        "\nWhat an import can't be faster than, each alone on two threads, seconds: best of "
        "the same rounds. `slowest`"
    )
    print(
        "takes the faster way to write; `cores` is read + kernel + SHA-256, what two cores do "
        "when they never wait."
    )
    print(
        "`start` is the whole process of `blobstore plan`, which reads headers only; it "
        "belongs to none of the limits.\n"
    )
    table(
        "type", "start", *LIMITS, "slowest", "cores", "import / slowest", "import / larger of both"
    )
    for sides in done:
        limits = best_of(sides.limits)
        bounds = slowest(limits), processor(limits)
        best = min(sides.ours)
        cells = [f"{limits[name]:.2f}" for name in ("start", *LIMITS)] + [
            f"{bound:.2f}" for bound in bounds
        ]
        show((sides.contest.name, *cells, f"{best / bounds[0]:.2f}", f"{best / max(bounds):.2f}"))


def spread(seconds: Sequence[float]) -> str:
    """Return the best and the median."""
    return f"{min(seconds):.2f} ({statistics.median(seconds):.2f})"


def machine(work: Path) -> str:
    """Return what the figures depend on, in a few lines."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in info if line.startswith("model name")),
        "unknown processor",
    )
    packages = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "numpy"))
    disk = subprocess.run(
        ["df", "--output=source,fstype,avail", "-h", work],
        capture_output=True,
        text=True,
        check=True,
    )
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    kernel = kernels.active().name
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, "
        f"{memory_gb:.0f} GB of memory, "
        f"Linux {platform.release()}\ndisk: {' '.join(disk.stdout.splitlines()[1].split())}\n"
        f"blobstore {blobstore.__version__} ({kernel} kernels), Python "
        f"{platform.python_version()}, {packages}"
    )


SECTIONS = {"speed": speed, "memory": memory, "resume": resume, "scale": scale}


def arguments_of(line: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} [default: all]"
    )
    parser.add_argument(
        "--size",
        type=float,
        default=FULL_SIZE_GB,
        help="GB of the folder in shards; the others go with it",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side [default: 3]")
    parser.add_argument(
        "--slow-rounds", type=int, default=1, help="runs of the peer for nvfp4 [default: 1]"
    )
    parser.add_argument(
        "--types",
        nargs="+",
        default=[contest.name for contest in CONTESTS],
        help="types of the speed section",
    )
    parser.add_argument(
        "--work", type=Path, help="a folder on the disk to measure [default: a temporary one]"
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the checkpoints in --work, for the next run"
    )
    arguments = parser.parse_args(line)
    for section in arguments.sections:
        if section not in SECTIONS:
            parser.error(f"no section {section!r}: there are {', '.join(SECTIONS)}")
    return arguments


def main(*line: str) -> None:
    """Print the sections that are asked for."""
    arguments = arguments_of(line)
    if arguments.work is not None:
        arguments.work.mkdir(parents=True, exist_ok=True)
    root = (
        Path(tempfile.mkdtemp(prefix="imports-"))
        if arguments.work is None
        else arguments.work.resolve() / "imports-bench"
    )
    root.mkdir(exist_ok=True)
    try:
        print(machine(root))
        sources = Sources(root, arguments.size)
        if sources.scale < 1:
            print(
                f"--size {arguments.size}: everything is {sources.scale:.2f} of its size, and "
                "the goals mean little"
            )
        for name in arguments.sections or SECTIONS:
            try:
                SECTIONS[name](sources, arguments)
            except SystemExit as stopped:
                print(f"\n{name} stopped: {stopped}")
    finally:
        for name in ("store", "target", "tunes") if arguments.keep else (".",):
            shutil.rmtree(root / name, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
