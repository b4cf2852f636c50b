"""What users see is as recorded (tests/README.md), by a sample with most commands.

All steps take minutes: ``python tests/battery replay``. ``allowed.toml`` lists what may differ.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = (
    *("manage", "inspect-dense", "care-dense", "export-dense", "sign", "metadata", "completion"),
)


@pytest.mark.lab
def test_a_sample_is_as_recorded() -> None:
    line = [sys.executable, str(Path(__file__).parent), "replay", *SAMPLE]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
