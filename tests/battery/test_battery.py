"""What users see is as recorded (docs/development.md); allowed.toml lists what may differ."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.lab
@pytest.mark.timeout(3600)
def test_replay() -> None:
    if shutil.which("docker-registry") is None:
        pytest.skip("NOT SHOWN: docker-registry is not installed")
    line = [sys.executable, str(Path(__file__).parent), "replay"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
