"""The fault laboratory: ``python tests/faults EXPERIMENT...`` prints the figures of each.

Without an option each runs in its long form. Exit code 0: nothing was seen that must not be; 1:
something was, it is on stderr; 77: this machine can't show a fault.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import (  # the path comes first
    archives,
    errors,
    intruders,
    kills,
    pairs,
    power_cuts,
    small_disks,
    soak,
)
from faults.lab.cases import Case, Figures, Task
from faults.lab.commands import warm_up
from faults.lab.file_systems import FILE_SYSTEMS, MEMORY, FileSystem
from support.mounts import NotShownError, keep_mounts_private

EXPERIMENTS = {
    "kills": (kills.experiment, 36),
    "power_cuts": (power_cuts.experiment, 16),
    "errors": (errors.experiment, 44),
    "lookups": (errors.lookups, 40),
    "refusals": (errors.refusals, 20),
    "small_disks": (small_disks.experiment, 16),
    "soak": (soak.experiment, 250),
    "pairs": (pairs.experiment, 24),
    "intruders": (intruders.experiment, 60),
    "archives": (archives.experiment, 8),
}
"""Each experiment, and how many faults its short form has."""
GOOD, BAD, NOT_SHOWN = 0, 1, 77
_VERDICTS = {GOOD: "good", BAD: "BAD", NOT_SHOWN: "NOT SHOWN"}
_MEMORY = Path("/dev/shm")  # noqa: S108  # stores in memory: most faults are not those of a disk


def main() -> int:
    """Run experiments; return the exit code."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its folder goes, too
    warm_up()
    gc.freeze()
    codes = set[int]()
    for name in arguments.on or [MEMORY.name]:
        where = f" on {name}" if arguments.on else ""
        codes.update(_run_all(arguments, FILE_SYSTEMS.get(name, MEMORY), where))
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
    parser.add_argument(
        "--on", nargs="+", choices=FILE_SYSTEMS, metavar="FILE_SYSTEM", help=", ".join(FILE_SYSTEMS)
    )
    parser.add_argument(
        "--seed", type=int, default=20_260_801, help="another one makes other random choices"
    )
    return parser.parse_args()


def _run_all(arguments: argparse.Namespace, file_system: FileSystem, where: str) -> set[int]:
    """Run all experiments on a file system; return their verdicts."""
    codes = set()
    with ExitStack() as stack:
        parent = _MEMORY if _MEMORY.is_dir() else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        folder.chmod(0o755)  # another user looks into it
        reason = None
        try:
            if file_system is not MEMORY:
                keep_mounts_private()
            folder = stack.enter_context(file_system.mounted(folder))
        except NotShownError as error:
            reason = error
        Case.stores = file_system.stores
        for name in arguments.experiments:
            experiment, short = EXPERIMENTS[name]
            count = short if arguments.short else arguments.count
            started = time.monotonic()
            found: Figures | NotShownError
            try:
                (folder / name).mkdir()
                task = Task(folder / name, count, arguments.seed, file_system)
                found = reason or experiment(task)
                code = GOOD if isinstance(found, Figures) and found.is_good else BAD
            except NotShownError as error:
                found, code = error, NOT_SHOWN
            except Exception:  # noqa: BLE001  # the other experiments are to be run
                found, code = Figures(zero=["broken off"]), BAD
                found.wrong("broken off", traceback.format_exc())
            code = NOT_SHOWN if isinstance(found, NotShownError) else code
            seconds = time.monotonic() - started
            line = f"{name}{where}: {_VERDICTS[code]} · {found} · seconds {seconds:,.0f}\n"
            sys.stdout.write(line)
            sys.stdout.flush()
            codes.add(code)
    return codes


if __name__ == "__main__":
    sys.exit(main())
