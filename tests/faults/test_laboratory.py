"""The short forms of the laboratory's experiments; with ``-m long`` the long ones.

docs/reliability.md describes them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from faults import power_cuts
from support.faults import cannot_run
from support.lab.disk import Event
from support.lab.figures import Figures
from support.lab.formats import FORMATS
from support.lab.fuse import FLUSH
from support.lab.wandering import Choices

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="the faults are made with calls of Linux"),
]
_EXPERIMENTS = (
    "kills",
    "power_cuts",
    "errors",
    "lookups",
    "small_disks",
    "soak",
    "pairs",
    "intruders",
)


def run(*arguments: str) -> tuple[dict[str, str], str]:
    """Run experiments; return the line of each, by its name, and what they say is wrong."""
    line = [sys.executable, str(Path(__file__).parent), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return dict(line.split(": ", 1) for line in done.stdout.splitlines()), done.stderr


def check(line: str | None, errors: str) -> None:
    """Fail, or skip loudly where a fault can't be shown, unless the experiment was good."""
    if line is not None and line.startswith("NOT SHOWN"):
        cannot_run(line)
    assert line is not None, errors
    assert line.startswith("good"), f"{line}{errors}"


@pytest.fixture(scope="module")
def short_forms() -> tuple[dict[str, str], str]:
    """The lines of all experiments, from one process: its start costs as much as one of them."""
    return run(*_EXPERIMENTS, "--short")


@pytest.mark.parametrize("experiment", _EXPERIMENTS)
def test_short_form(short_forms: tuple[dict[str, str], str], experiment: str) -> None:
    lines, errors = short_forms
    check(lines.get(experiment), errors)


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("experiment", _EXPERIMENTS)
def test_long_form(experiment: str) -> None:
    lines, errors = run(experiment)
    print(lines)  # noqa: T201  # the figures are what one wants to see
    check(lines.get(experiment), errors)


@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (
            slice(1024 + 0x30, 1024 + 0x34),
            "repaired at start",
        ),  # a time, in the first of the two sectors
        (slice(4096, 8192), "disks not mounted"),  # all group descriptors
    ],
)
def test_what_a_power_cut_may_do_to_a_disk(tmp_path: Path, damage: slice, seen: str) -> None:
    """A superblock that is torn is repaired, as at the start of a machine.

    What can't be mounted then is reported.
    """
    if os.geteuid() != 0:
        cannot_run("mounting needs root")
    image = bytearray(FORMATS["ext4"].empty_image(tmp_path / "image"))
    image[damage] = bytes(255 - byte for byte in image[damage])
    chance = random.Random(1)
    workshop = power_cuts.Workshop(
        tmp_path, FORMATS["ext4"], bytes(image), Choices(tmp_path, chance), chance
    )
    figures = Figures(zero=(), quiet=True)
    power_cuts.cut(workshop, [Event(FLUSH, 0, memoryview(b""))], 1, figures)
    assert {name for name, number in figures.counts.items() if number} == {"cuts", seen}


def test_processes_share_the_faults_of_an_experiment() -> None:
    lines, errors = run("kills", "--count", "12", "--jobs", "2")
    line = lines.get("kills")
    check(line, errors)
    assert line is not None
    assert "kills 12 · at calls 8 · at random 4 " in line
