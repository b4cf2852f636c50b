"""A tiny input that would need gigabytes of memory is refused cheaply."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from blobstore.cli.main import run
code = run(sys.argv[1:])
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
sys.exit(print(peak, file=sys.stderr) or code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is in /proc")
def test_a_header_that_is_a_hole_takes_little_memory(tmp_path: Path) -> None:
    """The process says its own peak: `ru_maxrss` begins with that of the one that starts it."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_000) + b'{"')
        file.truncate(100_000_008)
    line = [sys.executable, "-c", PROGRAM, "inspect", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=600)
    *errors, peak = done.stderr.splitlines()
    assert done.returncode == 1, errors
    assert any(text.startswith("Error: ") for text in errors)
    assert int(peak) * 1024 < 300_000_000
