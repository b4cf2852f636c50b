"""`StoreTests` finds mistakes in a store: each of a dozen mistakes fails one of its tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from contract.mistaken_homes import MISTAKES

SMALL = "not 65537 and not 10485"
"""Without blobs of a megabyte: mistakes show with small ones."""
HOMES = Path(__file__).with_name("mistaken_homes.py")


def test_every_mistake_is_seen() -> None:
    options = (
        "-q",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-o",
        "addopts=--import-mode=importlib",
    )
    line = [sys.executable, "-m", "pytest", *options, "-rA", "-k", SMALL, str(HOMES)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=HOMES.parents[2])
    seen = {number: set[str]() for number in range(len(MISTAKES))}
    for number, test in re.findall(
        r"^FAILED \S+::TestMistake(\d+)::(\w+)", done.stdout, re.MULTILINE
    ):
        seen[int(number)].add(test)
    passed = re.findall(r"^PASSED", done.stdout, re.MULTILINE)
    assert [mistake for number, mistake in enumerate(MISTAKES) if not seen[number]] == [], (
        done.stdout[-2000:]
    )
    assert len(passed) > len(MISTAKES) * 50  # a home that fails everything would show nothing
