"""Time of whole commands on a small model, beside the libraries that they load.

``python tests/bench/commands.py [--times N] [--before BLOBSTORE]``: each command as a process of
its own, in turn, warm. Printed are the best processor time and the median time in ms, and the ratio
of the first to that of a process that only loads typer, numpy and ml_dtypes. ``--before`` is the
command of another checkout, whose times come last. Installed packages have bytecode. Without it
(where PYTHONDONTWRITEBYTECODE is set, and nothing compiled it) every start compiles the package.
"""

from __future__ import annotations

import argparse
import compileall
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import PYCODE

import blobstore

PEER = [sys.executable, "-c", "import typer, numpy, ml_dtypes"]
PYTHON = [sys.executable, "-c", "pass"]
COMMANDS = {
    "--help": "--help",
    "list": "list --store STORE",
    "show": "show tiny --store STORE",
    "inspect": "inspect SOURCE",
    "verify": "verify --store STORE",
    "plan": "plan SOURCE --quant int4",
    "import": "import SOURCE new --quant int4 --store NEW",
    "import again": "import SOURCE tiny --quant int4 --store STORE",
}


def run(arguments: list[str]) -> tuple[float, float]:
    """Run a process; return its processor time and its time, in ms."""
    before, started = processor_seconds(), time.perf_counter()
    subprocess.run(arguments, check=True, capture_output=True)
    return 1e3 * (processor_seconds() - before), 1e3 * (time.perf_counter() - started)


def processor_seconds() -> float:
    """Return the processor seconds of all processes that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def line_of(program: list[str], words: str, folder: Path) -> list[str]:
    """Return a command line, whose new store does not exist yet."""
    places = {"SOURCE": PYCODE, "STORE": folder / "store", "NEW": folder / "new"}
    shutil.rmtree(places["NEW"], ignore_errors=True)
    return [*program, *(str(places.get(word, word)) for word in words.split())]


def measured(programs: list[list[str]], times: int, folder: Path) -> dict[str, list[list[float]]]:
    """Return processor times and times by name: of the peers, and of each program's commands."""
    found: dict[str, list[list[float]]] = {}
    for name in ("python", "peer", *COMMANDS):
        own = {"python": [PYTHON], "peer": [PEER]}.get(name)
        rows: list[list[float]] = [[] for _ in range(2 * len(own or programs))]
        for _ in range(times):
            for number, program in enumerate(own or programs):
                line = program if own else line_of(program, COMMANDS[name], folder)
                for row, value in zip(rows[2 * number :], run(line), strict=False):
                    row.append(value)
        found[name] = rows
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    compileall.compile_dir(Path(blobstore.__file__).parent, quiet=1)
    programs = [[sys.executable, "-m", "blobstore"]]
    programs += [[str(options.before)]] if options.before is not None else []
    with tempfile.TemporaryDirectory() as folder:
        words = "import SOURCE tiny --quant int4 --store STORE"
        run(line_of(programs[0], words, Path(folder)))
        found = measured(programs, options.times, Path(folder))
    peer = min(found["peer"][0])
    heads = ["command", "processor time, ms", "time, ms", "of the peer", "before"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name, (busy, seconds, *before) in found.items():
        cells = [f"{min(busy):.0f}", f"{statistics.median(seconds):.0f}", f"{min(busy) / peer:.2f}"]
        cells.append(f"{min(before[0]):.0f} · {statistics.median(before[1]):.0f}" if before else "")
        print(f"| `{name}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
