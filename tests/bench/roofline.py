"""What the machine could do at best, and what blobstore reaches: `python tests/bench/roofline.py`.

It makes a Qwen3-like folder under --work (default: a temporary folder; five times the size) and
prints two Markdown tables for imports, verification, export and loading. The first has the bytes
that each moves, and what each stage needs alone on one core. The second compares the whole process
with the best that is possible: the larger of all stages spread over the cores and the disk alone,
plus the start, which is the same operation on a tiny model. Everything is the best of --rounds, all
in turn, with a warm page cache.

--sha and --kernels take methods of slower processors, for the processes and for the stages.
--without-sha also hides the SHA instructions from OpenSSL, so from the peers that use it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hashing import WITHOUT_SHA
from import_limits import THREADS, hashing_alone, quantizing, reading, writing
from import_processes import ENVIRONMENT, Run
from import_sources import FULL_SIZE_GB, Sources, Weights, warm
from imports import fresh
from machine import clock_mhz, machine
from roofline_operations import Operation, imports_of, map_files, uses_of
from tables import show, table

from blobstore import hashing, kernels
from blobstore.errors import UsageError

TYPES = ("none", "int4", "int8", "nvfp4", "mxfp4", "mxfp8")
USED_TYPES = ("none", "int4")
OPERATIONS = ("import", "use")
STAGES = ("read", "kernel", "SHA-256", "write")
GB = 1e9
NOTHING = "-"


def stages_of(operation: Operation, weights: Weights, folder: Path) -> dict[str, float]:
    """Return the processor's seconds of each of STAGES alone on one core; and `disk`, seconds.

    Of the two ways to write, the faster one on all cores counts.
    """
    read = map_files if operation.is_mapped else reading
    found = dict.fromkeys((*STAGES, "disk"), 0.0)
    found["read"] = read(operation.read, 1).processor
    if operation.quantized is not None:
        found["kernel"] = quantizing(operation.quantized, weights, operation.method, 1).processor
    if operation.hashed:
        found["SHA-256"] = hashing_alone(operation.hashed, 1).processor
    if operation.written:
        choices = (False, True) if takes_direct_writes(folder.parent) else (False,)
        ways = [writing(operation.written, folder, direct=direct) for direct in choices]
        best = min(ways, key=lambda way: way.wall)
        found |= {"write": best.processor, "disk": best.wall}
    return found


def takes_direct_writes(folder: Path) -> bool:
    """Return True if the folder's file system has O_DIRECT: some that lie in memory do not."""
    path = folder / "direct"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


@dataclass(frozen=True, slots=True)
class Measured:
    """The rounds of one operation."""

    operation: Operation
    ours: list[Run] = field(default_factory=list)
    starts: list[Run] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def stage(self, name: str) -> float:
        """Return the seconds of a stage, or of the disk."""
        return min(one[name] for one in self.stages)

    @property
    def processor(self) -> float:
        """The seconds of all stages, one after the other on one core."""
        return sum(self.stage(name) for name in STAGES)

    @property
    def start(self) -> float:
        """The seconds of the operation on a tiny model."""
        return min(one.seconds for one in self.starts)

    @property
    def at_best(self) -> float:
        """The seconds that the machine needs at least."""
        return self.start + max(self.processor / THREADS, self.stage("disk"))

    @property
    def moved(self) -> dict[str, int]:
        """The bytes that each of STAGES moves; of the kernel those that it reads."""
        work = self.operation.quantized
        return {
            "read": sum(path.stat().st_size for path in self.operation.read),
            "kernel": sum(work.quantized.values()) if work is not None else 0,
            "SHA-256": self.operation.hashed,
            "write": sum(self.operation.written),
        }


def measure(operation: Operation, sources: Sources, rounds: int) -> Measured:
    """Run everything in turn. Raises: SystemExit when a process fails."""
    print(f"{operation.name} …", file=sys.stderr, flush=True)
    measured, target = Measured(operation), sources.root / "target"
    for _ in range(rounds):
        measured.ours.append(fresh(operation.ours, operation.warmed, target))
        measured.starts.append(fresh(operation.start, operation.warmed, target))
        if operation.peer is not None:
            measured.peer.append(operation.peer.seconds(target))
        os.sync()
        warm(operation.warmed)
        measured.stages.append(stages_of(operation, sources.weights, target))
    return measured


def stage_table(done: Iterable[Measured]) -> None:
    """Print bytes and stages."""
    clock = clock_mhz()
    cycles = " (cycles a byte)" if clock else ""
    print(f"\nBytes, GB; and the processor's seconds{cycles} of each stage alone on one core\n")
    table("operation", "read", "stored", "hashed", "written", *STAGES, "all stages")
    for measured in done:
        moved = measured.moved
        nbytes = (moved["read"], measured.operation.stored, moved["SHA-256"], moved["write"])
        stages = (stage_cell(measured.stage(name), moved[name], clock) for name in STAGES)
        name, total = measured.operation.name, f"{measured.processor:.2f}"
        show((name, *map(gigabytes, nbytes), *stages, total))


def gigabytes(nbytes: int) -> str:
    """Return an amount, or a dash for nothing."""
    return f"{nbytes / GB:.2f}" if nbytes else NOTHING


def stage_cell(seconds: float, nbytes: int, clock: float | None) -> str:
    """Return the seconds of a stage, with cycles a byte if the clock's MHz are known."""
    if not nbytes:
        return NOTHING
    return f"{seconds:.2f}" + (f" ({seconds * clock * 1e6 / nbytes:.2f})" if clock else "")


ROOF_HEADINGS = (
    "operation",
    "stages / cores",
    "disk",
    "start",
    "at best",
    "ours",
    "reached",
    "processor, at best",
    "processor, ours",
    "reached",
    "peer",
    "peer's",
    "ours / peer's",
)


def roof_table(done: Iterable[Measured], rounds: int) -> None:
    """Print what is possible and what is reached."""
    print(f"\nWhole processes, seconds, best of {rounds}\n")
    table(*ROOF_HEADINGS)
    for measured in done:
        ours = min(one.seconds for one in measured.ours)
        wall = (measured.start, measured.at_best, ours)
        show(
            (
                measured.operation.name,
                f"{measured.processor / THREADS:.2f}",
                f"{measured.stage('disk'):.2f}" if measured.operation.written else NOTHING,
                *(f"{seconds:.2f}" for seconds in wall),
                f"**{measured.at_best / ours:.2f}**",
                *processor_cells(measured),
                *peer_cells(measured, ours),
            )
        )


def processor_cells(measured: Measured) -> Sequence[str]:
    """Return the processor's seconds at best and ours, and their ratio."""
    least = measured.processor + min(one.processor for one in measured.starts)
    ours = min(one.processor for one in measured.ours)
    return (f"{least:.2f}", f"{ours:.2f}", f"{least / ours:.2f}")


def peer_cells(measured: Measured, ours: float) -> Sequence[str]:
    """Return the peer's name and time, and the ratio to it."""
    if measured.operation.peer is None:
        return (NOTHING, NOTHING, NOTHING)
    best = min(measured.peer)
    return (f"`{measured.operation.peer.name}`", f"{best:.2f}", f"{ours / best:.2f}")


def operations(sources: Sources, arguments: argparse.Namespace) -> Iterator[Operation]:
    """Yield what is to be measured, each when the one before is done."""
    source = sources.shards()
    if "import" in arguments.operations:
        for name in arguments.types:
            yield from imports_of(source, name, with_mlx=arguments.peers)
    if "use" in arguments.operations:
        for name in arguments.types:
            if name in USED_TYPES:
                yield from uses_of(source, name, sources.root)


def arguments_of(line: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "operations",
        nargs="*",
        help="import, or use: verify, export and load [default: both]",
    )
    add("--size", type=float, default=FULL_SIZE_GB, help="GB of the folder [default: 1.85]")
    add("--rounds", type=int, default=3, help="runs of each [default: 3]")
    add("--types", nargs="+", choices=TYPES, default=TYPES, help="types [default: all]")
    add("--work", type=Path, help="a folder on the disk to measure [default: a temporary one]")
    add("--sha", metavar="METHOD", help="hash as a slower processor does")
    add("--kernels", metavar="NAME", help="quantize as a slower processor does")
    add("--without-sha", action="store_true", help="OpenSSL without SHA instructions, too")
    add("--peers", action="store_true", help="run mlx_lm convert, too (slow)")
    arguments = parser.parse_args(line)
    if wrong := set(arguments.operations) - set(OPERATIONS):
        parser.error(f"unknown operation {min(wrong)!r}")
    if arguments.without_sha and arguments.sha in (None, "fastest", "sha-ni"):
        parser.error("--without-sha needs a --sha METHOD without SHA instructions")
    arguments.operations = arguments.operations or OPERATIONS
    return arguments


def force(arguments: argparse.Namespace) -> None:
    """Use slower methods in this process, and in those that it starts.

    Raises: UsageError for a method that is unknown, or that this processor does not have.
    """
    if arguments.sha:
        hashing.use_method(arguments.sha)
        ENVIRONMENT["BLOBSTORE_SHA256"] = arguments.sha
    if arguments.kernels:
        kernels.use(arguments.kernels)
        ENVIRONMENT["BLOBSTORE_KERNELS"] = arguments.kernels


def measured_all(wanted: Iterable[Operation], sources: Sources, rounds: int) -> list[Measured]:
    """Measure all operations, without those that fail."""
    done = []
    for operation in wanted:
        try:
            done.append(measure(operation, sources, rounds))
        except SystemExit as stopped:
            print(f"\n{operation.name} failed: {stopped}")
    return done


def main(*line: str) -> None:
    """Print both tables."""
    arguments = arguments_of(line)
    if arguments.without_sha and not WITHOUT_SHA.items() <= os.environ.items():
        # OpenSSL reads it when it is loaded, in this process too.
        environment = {**os.environ, **WITHOUT_SHA}
        os.execve(sys.executable, [sys.executable, __file__, *line], environment)  # noqa: S606
    try:
        force(arguments)
    except UsageError as error:
        sys.exit(f"{error.message}. {error.hint or ''}")
    root = Path(tempfile.mkdtemp(prefix="roofline-", dir=arguments.work))
    try:
        print(machine(root))
        if arguments.without_sha:
            print("OpenSSL runs without the SHA instructions")
        sources = Sources(root, arguments.size)
        done = measured_all(operations(sources, arguments), sources, arguments.rounds)
        stage_table(done)
        roof_table(done, arguments.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
