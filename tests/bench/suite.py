"""The test suite, run several times beside busy processes: ``tests/bench/suite.py``.

Prints pytest's closing line and the processor time of each run, and the reports of those that
failed. Exit code 1: one did.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUSY = [sys.executable, "-c", "while True: pass"]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep ``count`` processes busy for as long as the block lasts."""
    processes = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(arguments: list[str]) -> tuple[bool, str, float]:
    """Run pytest.

    Return whether all passed, what it printed, and the seconds of processor time of all its
    processes.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    line = [sys.executable, "-m", "pytest", "-q", *arguments]
    done = subprocess.run(
        line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        done.returncode == 0,
        done.stdout,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )


def main() -> int:
    """Run the suite as often as asked; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--busy", type=int, default=4, help="busy processes beside it")
    options, arguments = parser.parse_known_args()
    failed = 0
    for number in range(1, options.runs + 1):
        started = time.monotonic()
        with busy(options.busy):
            is_good, printed, seconds = run(arguments)
        closing = printed.strip().splitlines()[-1]
        print(
            (
                f"run {number}: {closing} · processor {seconds:,.0f} s · wall "
                f"{time.monotonic() - started:,.0f} s"
            ),
            flush=True,
        )
        if not is_good:
            failed += 1
            print(printed, flush=True)
    print(f"{options.runs} runs beside {options.busy} busy processes: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
