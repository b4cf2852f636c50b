"""The fault laboratory: ``python tests/faults EXPERIMENT [--count N] [--seed N]`` prints its figures in one line.

Exit code 0: nothing was seen that must not be; 1: something was, it is on stderr; 77: this machine can't show the fault.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.lab.cases import warm_up  # the path comes first
from support.lab.figures import NotShownError

EXPERIMENTS = ("kills", "power_cuts", "errors", "small_disks", "soak", "pairs", "intruders")
_NOT_SHOWN = 77
_MEMORY = Path("/dev/shm")  # noqa: S108  # stores in memory: what is not about a disk does not wait for one


def main() -> int:
    """Run one experiment; return the exit code."""
    parser = argparse.ArgumentParser(prog="python tests/faults", description=__doc__)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--count", type=int, help="how many faults at most; without it: the long form")
    parser.add_argument("--seed", type=int, default=20_260_801)
    arguments = parser.parse_args()
    experiment = import_module(f"faults.{arguments.experiment}")
    warm_up()
    gc.freeze()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        try:
            figures = experiment.experiment(Path(folder), arguments.count, arguments.seed)
        except NotShownError as error:
            sys.stderr.write(f"FAULT NOT SHOWN: {error}\n")
            return _NOT_SHOWN
    sys.stdout.write(f"{figures} · seconds {time.monotonic() - started:,.0f}\n")
    return 0 if figures.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
