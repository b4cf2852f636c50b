"""Imports from afar beside local ones, and beside a download that is converted afterwards.

`python tests/bench/afar.py [loopback] [distance] [space]` makes a BF16 checkpoint of 1.88 GB in
shards, serves it by nginx, plain and behind the stand-in for the Hub, and prints a table for each
section. *loopback*: the time of each side and its ratio to the local import. *distance*: the same
from a network namespace behind a line with 30 ms of latency, 100 MB/s a connection, and the rates
of ``--links`` (tests/support/wire.py; it needs root). *space*: memory and disk in a run of its own,
and what an import that was killed fetches again.

Times are those of whole processes, one after the other in each round, into an empty place, with the
source in the server's page cache. Peers: `hf download` (over HTTP: the stand-in has no Xet), and
that followed by `mlx_lm convert -q`. The Hub's API itself is near in all of them. curl says what
the line carries.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from far_sides import CONVERSION, DOWNLOAD, HUB, LOCAL, READING, WEB, Servers, Side, serving
from far_space import DiskPeak, sent_again
from import_processes import MemoryPeak
from import_sources import FULL_SIZE_GB, Sources
from machine import machine
from support.wire import Line, far_network
from tables import show, spread, table, yes

DELAY_S = 0.03
EACH = 100e6
GOAL_RATIO, GOAL_LINK, GOAL_MEMORY, GOAL_DISK, GOAL_AGAIN = 1.25, 0.85, 300e6, 0.05, 0.05
MB = 1e6


@dataclass(slots=True)
class Times:
    """The seconds of a side's commands together, and of the processor, in each round."""

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The fewest seconds."""
        return min(self.seconds)


def timed(sides: Sequence[Side], servers: Servers, rounds: int) -> dict[str, Times]:
    """Return the times of each side."""
    times = {side.name: Times() for side in sides}
    for _ in range(rounds):
        for side in sides:
            done = servers.run(side.commands(servers))
            times[side.name].seconds.append(sum(run.seconds for run in done))
            times[side.name].processor.append(sum(run.processor for run in done))
    return times


def loopback(source: Path, work: Path, arguments: argparse.Namespace) -> None:
    """Print times from servers on this machine."""
    sides = (LOCAL, WEB, HUB, DOWNLOAD, CONVERSION)
    with serving(source, work / "near") as servers:
        times = timed(sides, servers, arguments.rounds)
    print(
        f"\nLoopback, seconds: best (median) of {arguments.rounds}; ratios of the best. The "
        "processor's seconds are those of\nthe side, without the server's\n"
    )
    headings = ("seconds", "processor", "/ local import", "goal", "reached", "/ download, convert")
    table("", *headings)
    local, peer = times[LOCAL.name].best, times[CONVERSION.name].best
    for side in sides:
        best = times[side.name].best
        is_ours = side in (WEB, HUB)
        goal = (f"{GOAL_RATIO}", yes(best <= GOAL_RATIO * local)) if is_ours else ("", "")
        show(
            (
                side.name,
                spread(times[side.name].seconds),
                f"{min(times[side.name].processor):.2f}",
                f"{best / local:.2f}",
                *goal,
                f"{best / peer:.2f}",
            )
        )


def distance(source: Path, work: Path, arguments: argparse.Namespace) -> None:
    """Print times from a far network, as a part of what its line could carry."""
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    print(
        f"\nDistance: {DELAY_S * 1e3:.0f} ms there and back, {EACH / MB:.0f} MB/s a connection; "
        f"seconds: best (median) of {arguments.rounds};\nthe line's use is the source's "
        f"{nbytes / MB:,.0f} MB / seconds / rate\n"
    )
    table("line, MB/s", "", "seconds", "use of the line", "goal", "reached")
    for link in arguments.links:
        sides = (READING, WEB, HUB, DOWNLOAD, CONVERSION)
        with (
            far_network(Line(delay_s=DELAY_S, rate=link * MB, each=EACH)) as network,
            serving(source, work / f"far{link}", network) as servers,
        ):
            times = timed(sides, servers, arguments.rounds)
        for side in sides:
            use = nbytes / times[side.name].best / (link * MB)
            goal = (f"{GOAL_LINK}", yes(use >= GOAL_LINK)) if side in (WEB, HUB) else ("", "")
            show((f"{link}", side.name, spread(times[side.name].seconds), f"{use:.2f}", *goal))


def space(source: Path, work: Path, arguments: argparse.Namespace) -> None:
    """Print memory, disk, and what is fetched again after a kill."""
    random = Random(17)
    print(
        "\nSpace: the largest anonymous memory, MB; the most bytes on the disk, less those of the\n"
        "blobs, as a part of the blobs; bytes sent again after a kill at a random moment, as a\n"
        f"part of the source, most of {arguments.kills}\n"
    )
    headings = ("memory", "goal", "reached", "disk", "goal", "reached", "again", "goal", "reached")
    table("", *headings)
    with serving(source, work / "space") as servers:
        for side in (WEB, HUB):
            (line,) = side.commands(servers)
            peak, disk = MemoryPeak(), DiskPeak(servers.target)
            servers.run([line], lambda pid, peak=peak, disk=disk: (peak(pid), disk(pid)))  # type: ignore[misc]
            extra = disk.beyond()
            (done,) = servers.run([line])
            kills = range(arguments.kills)
            again = max(sent_again(line, servers, done.seconds, random) for _ in kills)
            show(
                (
                    side.name,
                    *(f"{peak.anonymous / MB:.0f}", f"{GOAL_MEMORY / MB:.0f}"),
                    yes(peak.anonymous <= GOAL_MEMORY),
                    *(f"{extra:.3f}", f"{GOAL_DISK}", yes(extra <= GOAL_DISK)),
                    *(f"{again:.3f}", f"{GOAL_AGAIN}", yes(again <= GOAL_AGAIN)),
                )
            )


SECTIONS = {"loopback": loopback, "distance": distance, "space": space}


def arguments_of(line: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", choices=[*SECTIONS, []])
    parser.add_argument("--size", type=float, default=FULL_SIZE_GB, help="GB of the source")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side [default: 3]")
    parser.add_argument("--kills", type=int, default=5, help="kills of each import [default: 5]")
    parser.add_argument(
        "--links", type=int, nargs="+", default=[200, 400], help="rates of the line, MB/s"
    )
    parser.add_argument("--work", type=Path, help="a folder on the disk to measure")
    return parser.parse_args(line)


def main(*line: str) -> None:
    """Print the sections that are asked for."""
    arguments = arguments_of(line)
    root = Path(tempfile.mkdtemp(prefix="afar-", dir=arguments.work))
    try:
        print(machine(root, ("mlx", "mlx-lm", "huggingface_hub")))
        source = Sources(root, arguments.size).shards()
        for name in arguments.sections or SECTIONS:
            SECTIONS[name](source, root, arguments)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
