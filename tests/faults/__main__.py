"""The fault laboratory: ``python tests/faults EXPERIMENT...`` prints the figures of each in one line.

Without an option it is the long form. Exit code 0: nothing was seen that must not be; 1: something was, it is on stderr;
77: this machine can't show a fault.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.lab.commands import warm_up  # the path comes first
from support.lab.figures import NotShownError

EXPERIMENTS = ("kills", "power_cuts", "errors", "small_disks", "soak", "pairs", "intruders")
GOOD, BAD, NOT_SHOWN = 0, 1, 77
_VERDICTS = {GOOD: "good", BAD: "BAD", NOT_SHOWN: "NOT SHOWN"}
_MEMORY = Path("/dev/shm")  # noqa: S108  # stores in memory: what is not about a disk does not wait for one


def main() -> int:
    """Run experiments; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python tests/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS, metavar="EXPERIMENT", help=", ".join(EXPERIMENTS))
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--short", action="store_true", help="the short form, as the test suite runs it")
    length.add_argument("--count", type=int, help="how many faults at most")
    parser.add_argument("--seed", type=int, default=20_260_801, help="another one makes other random choices")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its folder goes, too
    warm_up()
    gc.freeze()
    codes = set()
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        Path(folder).chmod(0o755)  # another user looks into it
        for name in arguments.experiments:
            experiment = import_module(f"faults.{name}")
            count = experiment.SHORT if arguments.short else arguments.count
            codes.add(run(name, Path(folder) / name, count, arguments.seed))
    return max(codes, key=(GOOD, NOT_SHOWN, BAD).index)


def run(name: str, folder: Path, count: int | None, seed: int) -> int:
    """Run one experiment in ``folder``, print its line, and return its verdict."""
    started = time.monotonic()
    folder.mkdir()
    try:
        figures = import_module(f"faults.{name}").experiment(folder, count, seed)
        code = GOOD if figures.is_good else BAD
    except NotShownError as error:
        figures, code = error, NOT_SHOWN
    seconds = time.monotonic() - started
    sys.stdout.write(f"{name}: {_VERDICTS[code]} · {figures} · seconds {seconds:,.0f}\n")
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
