"""The short forms of the experiments of docs/reliability.md; ``-m long``: the long ones."""

import subprocess
import sys
from pathlib import Path

import pytest
from faults.mounts import cannot_run

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(sys.platform != "linux", reason="the faults are made with calls of Linux"),
]
EXPERIMENTS = ("kills", "power_cuts", "errors", "soak", "intruders")


def run(*arguments: str) -> tuple[dict[str, str], str]:
    """Run experiments; return the line of each, by its name, and what they say is wrong."""
    line = [sys.executable, f"{Path(__file__).parent}", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return dict(line.split(": ", 1) for line in done.stdout.splitlines()), done.stderr


@pytest.fixture(scope="module")
def short_forms() -> tuple[dict[str, str], str]:
    """The lines of all experiments, from one process: its start costs as much as one of them."""
    return run(*EXPERIMENTS, "--short")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_short_form(short_forms: tuple[dict[str, str], str], experiment: str) -> None:
    lines, errors = short_forms
    line = lines.get(experiment, "")
    if line.startswith("NOT SHOWN"):
        cannot_run(line)
    assert line.startswith("good"), f"{line}{errors}"


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_long_form(experiment: str) -> None:
    test_short_form(run(experiment), experiment)
