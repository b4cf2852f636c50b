"""Tiny inputs that would need gigabytes of memory are refused cheaply.

Each command runs in a process of its own, which says how much memory it had at most. (`ru_maxrss`
would not do: it begins with what the process has that starts it.)
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import LLAMA_CONFIG, raw_safetensors, write_checkpoint

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


def linked(folder: Path, first: str, names: list[str]) -> None:
    for name in names:
        os.link(folder / first, folder / name)


def shards_of_metadata(folder: Path) -> Path:
    """1,000 shards of 1 MB of metadata, all but one the same file."""
    folder.mkdir()
    names = [f"model-{number:05}-of-01000.safetensors" for number in range(1, 1001)]
    (folder / names[0]).write_bytes(
        raw_safetensors({"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    )
    (folder / names[1]).write_bytes(raw_safetensors({"__metadata__": {"k": "<" * MIB}}))
    linked(folder, names[1], names[2:])
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    return folder


def files_of_tensors(folder: Path) -> Path:
    """500 files of 17,000 empty tensors, all the same."""
    folder.mkdir()
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    (folder / "a.safetensors").write_bytes(
        raw_safetensors({f"{number:x}": entry for number in range(17_000)})
    )
    linked(folder, "a.safetensors", [f"a{number:03}.safetensors" for number in range(499)])
    return folder


def hole(path: Path, begin: bytes, length: int) -> None:
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(length)


def index_of_nothing(folder: Path) -> Path:
    hole(write_checkpoint(folder) / "model.safetensors.index.json", b"{", 199_000_000)
    return folder


def header_of_nothing(folder: Path) -> Path:
    folder.mkdir()
    hole(folder / "model.safetensors", struct.pack("<Q", 100_000_000) + b'{"', 100_000_008)
    return folder


def template_of_nothing(folder: Path) -> Path:
    write_checkpoint(folder)
    hole(folder / "tokenizer_config.json", b'{"a":[1]}', 187_000_000)
    return folder


@pytest.mark.parametrize(
    ("make", "command", "code"),
    [
        (shards_of_metadata, "plan", 1),
        (files_of_tensors, "inspect", 0),
        (index_of_nothing, "inspect", 1),
        (header_of_nothing, "inspect", 1),
        (template_of_nothing, "plan", 0),
    ],
)
def test_memory(make: Callable[[Path], Path], command: str, code: int, tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    assert (
        sum(
            file.st_blocks * 512
            for file in {path.stat().st_ino: path.stat() for path in folder.iterdir()}.values()
        )
        < 3 * MIB
    )
    line = [sys.executable, "-c", PROGRAM, command, str(folder)]
    done = subprocess.run(
        line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, timeout=300
    )
    *errors, peak = done.stderr.splitlines()
    assert (done.returncode, any(text.startswith("Error: ") for text in errors)) == (
        code,
        code != 0,
    ), errors
    assert int(peak) * 1024 < MOST
