"""The fault laboratory: ``python tests/faults EXPERIMENT...`` prints the figures of each.

Without an option each runs in its long form. Exit code 0: nothing was seen that must not be; 1:
something was, it is on stderr; 77: this machine can't show a fault.
"""

import argparse
import gc
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import errors, intruders, kills, power_cuts, soak
from faults.lab.cases import Task
from faults.lab.commands import warm_up
from faults.mounts import NotShownError

EXPERIMENTS = {
    "kills": (kills.experiment, 20),
    "power_cuts": (power_cuts.experiment, 8),
    "errors": (errors.experiment, 30),
    "soak": (soak.experiment, 100),
    "intruders": (intruders.experiment, 30),
}
"""Each experiment, and how many faults its short form has."""
GOOD, BAD, NOT_SHOWN = 0, 1, 77
_VERDICTS = {GOOD: "good", BAD: "BAD", NOT_SHOWN: "NOT SHOWN"}


def main() -> int:
    """Run experiments; return the exit code."""
    arguments = _arguments()
    warm_up()
    gc.freeze()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        Path(folder).chmod(0o755)  # another user looks into it
        codes = {_run(name, arguments, Path(folder)) for name in arguments.experiments}
    return max(codes, key=(GOOD, NOT_SHOWN, BAD).index)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "experiments",
        nargs="+",
        choices=EXPERIMENTS,
        metavar="EXPERIMENT",
        help=", ".join(EXPERIMENTS),
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--short", action="store_true", help="as the test suite runs it")
    length.add_argument("--count", type=int, help="how many faults at most")
    memory = Path("/dev/shm")  # noqa: S108  # most faults are not those of a disk
    parser.add_argument(
        "--folder",
        default=memory if memory.is_dir() else None,
        help="where the stores lie: another file system than memory",
    )
    parser.add_argument("--seed", type=int, default=20_260_801, help="for other random choices")
    return parser.parse_args()


def _run(name: str, arguments: argparse.Namespace, folder: Path) -> int:
    """Run an experiment, print its figures and return its verdict."""
    experiment, short = EXPERIMENTS[name]
    count = short if arguments.short else arguments.count
    started = time.monotonic()
    (folder / name).mkdir()
    found: object
    try:
        figures = experiment(Task(folder / name, count, random.Random(arguments.seed)))
        found, code = figures, BAD if figures.faults else GOOD
    except NotShownError as error:
        found, code = error, NOT_SHOWN
    except Exception:  # noqa: BLE001  # the other experiments are to be run
        sys.stderr.write(traceback.format_exc())
        found, code = "broken off", BAD
    seconds = time.monotonic() - started
    sys.stdout.write(f"{name}: {_VERDICTS[code]} · {found} · seconds {seconds:,.0f}\n")
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
