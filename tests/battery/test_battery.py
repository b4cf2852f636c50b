"""What users see is as recorded (tests/README.md), by a sample with every command.

All 934 steps take minutes: ``python tests/battery replay``. ``allowed.toml`` lists what may differ.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = (
    *("names", "helps", "manage", "plan-dense", "inspect-dense", "care-dense", "quality-dense"),
    *("export-dense", "pack-dense", "sign", "registry-moe", "serve-dense", "run-dense"),
    *("metadata", "completion", "schema"),
)


@pytest.mark.lab
def test_a_sample_is_as_recorded() -> None:
    if shutil.which("docker-registry") is None:
        pytest.skip("NOT SHOWN: docker-registry is not installed")
    line = [sys.executable, str(Path(__file__).parent), "replay", *SAMPLE]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
