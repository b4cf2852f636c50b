"""Validated files do not hurt MLX: every file of the corpus and generated ones.

With `-m long` it generates 30,000.
"""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from header_inputs import Inputs
from support import ROOT
from support.corpus import load

from blobstore.errors import BlobStoreError
from blobstore.formats.safetensors.codec import header_of as read_header
from blobstore.io.ranges import BytesReader

PROGRAM = ROOT / "tests" / "fuzz" / "mlx_files.py"
DIMS = (0, 1, 1, 1, 2, 2**16, 2**20, 2**30, 2**31 - 1, 2**31)


def valid_files(seed: str) -> Iterator[bytes]:
    """Yield files that our validator passes: grammar and mutations."""
    inputs = Inputs(seed)
    while True:
        raw = inputs.next()
        try:
            read_header(BytesReader(raw))
        except BlobStoreError:
            inputs.renew()
            continue
        yield raw


def large_shapes(seed: str) -> Iterator[bytes]:
    """Yield files of one empty tensor whose other dimensions are as large as possible.

    Ranks go up to 64.
    """
    generator = random.Random(seed)
    while True:
        shape = [generator.choice(DIMS) for _ in range(generator.choice((1, 2, 3, 5, 8, 32, 64)))]
        shape[generator.randrange(len(shape))] = 0
        text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
        yield struct.pack("<Q", len(text)) + text


def use(folder: Path) -> str:
    """Give every file of a folder to MLX; return the last line that was said."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (done.returncode, lines[-3:], done.stderr[-2000:])
    return lines[-1]


def write(folder: Path, files: Iterator[bytes], prefix: str) -> None:
    folder.mkdir(exist_ok=True)
    for number, raw in enumerate(files):
        (folder / f"{prefix}-{number:06d}.safetensors").write_bytes(raw)


def test_mlx_survives_what_we_pass(tmp_path: Path) -> None:
    for case in load("header"):
        if not case.by_recipe:
            case.write(tmp_path / case.id)
    write(tmp_path, islice(valid_files("short"), 200), "mutated")
    write(tmp_path, islice(large_shapes("short"), 50), "shape")
    assert int(use(tmp_path).split()[0]) > 150


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_mlx_survives_many_files(tmp_path: Path) -> None:
    said = []
    for batch in range(10):
        folder = tmp_path / f"{batch}"
        write(folder, islice(valid_files(f"long {batch}"), 2500), "mutated")
        write(folder, islice(large_shapes(f"long {batch}"), 500), "shape")
        said.append(use(folder))
    assert sum(int(line.split()[0]) for line in said) > 10_000, said
