"""Imports from outside: speed, start, memory, work done twice, and many tensors.

`python tests/bench/imports.py [speed] [start] [memory] [resume] [scale]` makes its checkpoints
under --work (default: a temporary folder; 15 GB), runs `python -m blobstore import` in processes of
its own, and prints Markdown tables; without a name all sections. Goals are for the full size and
an idle machine: --size 0.3 tries the sections out.

Speed is the wall time of whole processes with a warm page cache, alternating with the peer's, each
into an empty place after a `sync`: ours durable as it is, theirs (mlx_lm convert; cp, sync and
sha256sum one after the other) as they are.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from import_limits import LIMITS, at_best, best_of, disk, measure_all, processor, work_of
from import_memory import GOAL_MB, MB, memory, scale
from import_processes import MemoryPeak, Run, import_command, run
from import_resume import resume
from import_sources import FULL_SIZE_GB, Sources, warm
from import_start import start
from machine import machine
from retired import RETIRED, retire
from tables import show, spread, table, yes

GOAL_REACHED = 0.8


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
        1 / 8,
    ),
    Contest("mxfp8", ("--quant", "mxfp8"), ("-q", "--q-mode", "mxfp8"), 1 / 8),
    Contest("nvfp4", ("--quant", "nvfp4"), ("-q", "--q-mode", "nvfp4"), 1 / 60, slow=True),
    Contest("none", (), (), 0.35),
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

    The source is in the page cache. Raises: SystemExit when the command fails.
    """
    retire(target)
    os.sync()
    warm(source)
    done = run(command(target)).checked()
    retire(target)
    return done


@dataclass(frozen=True, slots=True)
class Sides:
    """The times of one contest, seconds, and the anonymous memory of one more import, bytes."""

    contest: Contest
    memory: int
    ours: list[float]
    peer: list[float]
    limits: list[dict[str, float]]


def contend(contest: Contest, sources: Sources, arguments: argparse.Namespace) -> Sides:
    """Run both sides in turn, and each limit after them. Raises: SystemExit when a side fails."""
    source, target = sources.shards(), sources.root / "target"
    work = work_of(source, *contest.ours)
    sides = Sides(contest, memory_of(contest, source, target), [], [], [])
    for number in range(arguments.rounds):
        sides.ours.append(
            fresh(lambda to: import_command(source, to, *contest.ours), source, target).seconds
        )
        if number < (arguments.slow_rounds if contest.slow else arguments.rounds):
            sides.peer.append(
                fresh(lambda to: peer_command(contest, source, to), source, target).seconds
            )
        os.sync()
        warm(source)
        sides.limits.append(measure_all(source, work, sources.weights, target))
    return sides


def memory_of(contest: Contest, source: Path, target: Path) -> int:
    """Return the largest anonymous memory of an import of its own: sampling takes time."""
    peak = MemoryPeak()
    run(import_command(source, target, *contest.ours), peak).checked()
    return peak.anonymous


def speed(sources: Sources, arguments: argparse.Namespace) -> None:
    """Print both tables of the speed section."""
    chosen = [contest for contest in CONTESTS if contest.name in arguments.types]
    done = [contend(contest, sources, arguments) for contest in chosen]
    against_peers(done, arguments)
    against_limits(done)


def against_peers(done: Sequence[Sides], arguments: argparse.Namespace) -> None:
    """Print times beside those of the peers, and memory."""
    print(
        f"\nSpeed, seconds: best (median) of {arguments.rounds}; nvfp4's peer of "
        f"{arguments.slow_rounds}. Memory is the largest\nanonymous memory of a run of its own, MB."
    )
    print()
    headings = ("type", "ours", "peer", "peer's seconds", "ratio of the best", "goal", "reached")
    table(*headings, "memory", "goal", "reached")
    for sides in done:
        contest, ratio = sides.contest, min(sides.ours) / min(sides.peer)
        show(
            (
                contest.name,
                spread(sides.ours),
                contest.peer_name,
                spread(sides.peer),
                f"{ratio:.3f}",
                f"{contest.goal:.3g}",
                yes(ratio <= contest.goal),
                f"{sides.memory / MB:.0f}",
                f"{GOAL_MB}",
                yes(sides.memory <= GOAL_MB * MB),
            )
        )


def against_limits(done: Sequence[Sides]) -> None:
    """Print the lower bounds, and how near the imports are to them."""
    print(
        "\nWhat an import can't be faster than, each alone on all cores, seconds: best of the\n"
        "same rounds. `start` is the whole process of importing a tiny model. `cores` is\n"
        "read + kernel + SHA-256: what the cores do if they never wait. `disk` is the faster way\n"
        "to write. `at best` is start + the larger of cores and disk; `reached` is at best /\n"
        "import. `plan` is shown only.\n"
    )
    table("type", *LIMITS, "cores", "disk", "at best", "import", "reached", "goal", "met")
    for sides in done:
        limits, ours = best_of(sides.limits), min(sides.ours)
        bounds = (processor(limits), disk(limits), at_best(limits))
        cells = [f"{limits[name]:.2f}" for name in LIMITS] + [f"{bound:.2f}" for bound in bounds]
        reached = bounds[-1] / ours
        met = yes(reached >= GOAL_REACHED)
        show((sides.contest.name, *cells, f"{ours:.2f}", f"{reached:.2f}", f"{GOAL_REACHED}", met))


SECTIONS = {
    "speed": speed,
    "start": start,
    "memory": memory,
    "resume": resume,
    "scale": scale,
}


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
        for name in ("store", "target", "tunes", RETIRED) if arguments.keep else (".",):
            shutil.rmtree(root / name, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
