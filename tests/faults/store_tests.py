"""The ordinary tests of the store, with their folders on another file system (``--on``)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.lab.figures import Figures
from support.lab.task import Task

SHORT = 1
_TESTS = Path(__file__).resolve().parents[1] / "unit"
_TRIED = ("store", "care")
_COUNTED = ("passed", "skipped")
_ZERO = ("failed", "errors")


def experiment(task: Task) -> Figures:
    """Return how many tests passed, and what failed; the first part runs all of them."""
    figures = Figures(*_COUNTED, zero=_ZERO)
    if task.is_first:
        folders = [_TESTS / name for name in _TRIED]
        options: list[str | Path] = [
            "-q",
            "-n0",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "--basetemp",
            task.folder / "tests",
        ]
        line = [sys.executable, "-m", "pytest", *options, *folders]
        done = subprocess.run(
            line, cwd=_TESTS.parents[1], capture_output=True, text=True, check=False
        )
        for number, name in re.findall(
            r"(\d+) (passed|skipped|failed|error)", done.stdout.splitlines()[-1]
        ):
            figures.add("errors" if name == "error" else name, int(number))
        for failed in re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE):
            sys.stderr.write(f"{failed}\n")
        figures.expect(done.returncode in (0, 1), "errors", f"{done.stdout}{done.stderr}")
    return figures
