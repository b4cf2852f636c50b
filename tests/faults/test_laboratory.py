"""The experiments of the fault laboratory: their short forms, and with ``-m long`` the long ones (docs/reliability.md)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.faults import cannot_run

_LABORATORY = Path(__file__).parent
_NOT_SHOWN = 77
_SHORT = {
    "kills": 45,
    "power_cuts": 24,
    "errors": 60,
    "small_disks": 24,
    "soak": 300,
    "pairs": 40,
    "intruders": 80,
}


def run(experiment: str, *options: object) -> str:
    """Run an experiment and return its figures; fail when it saw what must not be."""
    line = [sys.executable, str(_LABORATORY), experiment, *map(str, options)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode == _NOT_SHOWN:
        cannot_run(done.stderr.strip())
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("experiment", _SHORT)
def test_short_form(experiment: str) -> None:
    assert " 0" in run(experiment, "--count", _SHORT[experiment])


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("experiment", _SHORT)
def test_long_form(experiment: str) -> None:
    print(experiment, run(experiment))  # noqa: T201  # the figures are what one wants to see
