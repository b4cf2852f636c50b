"""Tiny inputs that would need gigabytes of memory are refused cheaply.

Each command runs in a process of its own, which prints how much memory it had at most.
(`ru_maxrss` would not do: it begins with what the process has that starts it.)
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import raw_safetensors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is in /proc")
MIB = 2**20
MOST = 300_000_000
PROGRAM = """
import sys
from blobstore.cli.main import run
code = run(sys.argv[1:])
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
sys.exit(print(peak, file=sys.stderr) or code)
"""


def files_of_tensors(folder: Path) -> None:
    """500 files of 17,000 empty tensors, all the same."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    first = folder / "a.safetensors"
    first.write_bytes(raw_safetensors({f"{number:x}": entry for number in range(17_000)}))
    for number in range(499):
        os.link(first, folder / f"a{number:03}.safetensors")


def header_of_nothing(folder: Path) -> None:
    """A header of 100 MB, which is a hole."""
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 100_000_000) + b'{"')
        file.truncate(100_000_008)


@pytest.mark.parametrize(("write", "code"), [(files_of_tensors, 0), (header_of_nothing, 1)])
def test_a_small_folder_takes_little_memory(
    write: Callable[[Path], None], code: int, tmp_path: Path
) -> None:
    write(tmp_path)
    blocks = {path.stat().st_ino: path.stat().st_blocks for path in tmp_path.iterdir()}
    assert sum(blocks.values()) * 512 < 3 * MIB
    line = [sys.executable, "-c", PROGRAM, "inspect", str(tmp_path)]
    done = subprocess.run(
        line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, timeout=600
    )
    *errors, peak = done.stderr.splitlines()
    assert done.returncode == code, errors
    assert any(text.startswith("Error: ") for text in errors) is (code != 0)
    assert int(peak) * 1024 < MOST
