"""The fault laboratory: ``python tests/faults EXPERIMENT...`` prints each one's figures.

Without an option it is the long form. Exit code 0: nothing was seen that must not be; 1: something
was, it is on stderr; 77: this machine can't show a fault.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import signal
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.lab.cases import Case  # the path comes first
from support.lab.commands import warm_up
from support.lab.figures import Figures, NotShownError
from support.lab.file_systems import FILE_SYSTEMS, MEMORY, FileSystem
from support.lab.mounts import keep_mounts_private
from support.lab.task import Task

EXPERIMENTS = (
    "kills",
    "power_cuts",
    "errors",
    "lookups",
    "small_disks",
    "soak",
    "pairs",
    "intruders",
)
GOOD, BAD, NOT_SHOWN = 0, 1, 77
_VERDICTS = {GOOD: "good", BAD: "BAD", NOT_SHOWN: "NOT SHOWN"}
_MEMORY = Path("/dev/shm")  # noqa: S108  # stores in memory: what is not about a disk does not wait for one
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Result:
    """What one process found in one experiment, or why it could not be shown.

    And how long it took.
    """

    found: Figures | NotShownError
    seconds: float


def main() -> int:
    """Run experiments; return the exit code."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its folder goes, too
    warm_up()
    gc.freeze()
    codes = set()
    for name in arguments.on or [MEMORY.name]:
        file_system = FILE_SYSTEMS.get(name, MEMORY)
        with ExitStack() as stack:
            parts = [
                stack.enter_context(_Part(arguments, file_system, part))
                for part in range(arguments.jobs)
            ]
            for experiment in arguments.experiments:
                where = f" on {name}" if arguments.on else ""
                codes.add(_say(f"{experiment}{where}", [part.next() for part in parts]))
    return max(codes, key=(GOOD, NOT_SHOWN, BAD).index)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = (*EXPERIMENTS, "refusals", "store_tests")
    parser.add_argument(
        "experiments", nargs="+", choices=known, metavar="EXPERIMENT", help=", ".join(known)
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--short", action="store_true", help="the short form, as the test suite runs it"
    )
    length.add_argument("--count", type=int, help="how many faults at most")
    parser.add_argument(
        "--on", nargs="+", choices=FILE_SYSTEMS, metavar="FILE_SYSTEM", help=", ".join(FILE_SYSTEMS)
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="how many processes share the faults of each experiment"
    )
    parser.add_argument(
        "--seed", type=int, default=20_260_801, help="another one makes other random choices"
    )
    return parser.parse_args()


class _Part:
    """A process that does its part of every experiment, one after the other."""

    def __init__(self, arguments: argparse.Namespace, file_system: FileSystem, part: int) -> None:
        self._results, theirs = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_work, args=(arguments, file_system, part, theirs))
        self._theirs = theirs

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()
        return self

    def next(self) -> Result:
        """Return what it found in the next experiment. Raises: EOFError when it has failed."""
        result: Result = self._results.recv()
        return result

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._process.terminate()
        self._process.join()


def _work(
    arguments: argparse.Namespace, file_system: FileSystem, part: int, results: Connection
) -> None:
    """Be the process of a part: mount the file system, and send the result of each experiment."""
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
            )
        )
        folder.chmod(0o755)  # another user looks into it
        try:
            if file_system is not MEMORY:
                keep_mounts_private()
            for name in ("mounts", "memory"):
                (folder / name).mkdir()
            mounted = stack.enter_context(file_system.mounted(folder / "mounts"))
        except NotShownError as error:
            for _ in arguments.experiments:
                results.send(Result(error, 0))
            return
        Case.stores = file_system.stores
        for name in arguments.experiments:
            experiment = import_module(f"faults.{name}")
            count = experiment.SHORT if arguments.short else arguments.count
            below = folder / "memory" if getattr(experiment, "IN_MEMORY", False) else mounted
            (below / name).mkdir()
            task = Task(below / name, count, arguments.seed, part, arguments.jobs, file_system)
            results.send(_run(name, task))


def _run(name: str, task: Task) -> Result:
    started = time.monotonic()
    try:
        found: Figures | NotShownError = import_module(f"faults.{name}").experiment(task)
    except NotShownError as error:
        found = error
    except Exception:  # noqa: BLE001  # the other experiments are to be run
        found = Figures(zero=["broken off"])
        found.wrong("broken off", traceback.format_exc())
    return Result(found, time.monotonic() - started)


def _say(name: str, results: list[Result]) -> int:
    """Print the line of an experiment, and return its verdict."""
    found = results[0].found
    for result in results[1:]:
        if isinstance(found, Figures) and isinstance(result.found, Figures):
            found.include(result.found)
        elif isinstance(found, Figures):
            found = result.found
    code = NOT_SHOWN if isinstance(found, NotShownError) else GOOD if found.is_good else BAD
    seconds = max(result.seconds for result in results)
    sys.stdout.write(f"{name}: {_VERDICTS[code]} · {found} · seconds {seconds:,.0f}\n")
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
