"""The scanners under the sanitizers: `python -m pytest -m long tests/fuzz`."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest
from header_inputs import Inputs
from headers import corpus_files
from support import ROOT

SCANNER = ROOT / "src" / "blobstore" / "formats" / "safetensors"
TEXTS = 1_000_000


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_scanners_stay_in_their_text(tmp_path: Path) -> None:
    program = tmp_path / "scan"
    flags = [
        "-std=c++20",
        "-O1",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-DFROM_STDIN",
    ]
    sources = [
        f"-I{SCANNER}",
        str(ROOT / "tests" / "fuzz" / "scan.cpp"),
        str(SCANNER / "scan.cpp"),
    ]
    subprocess.run(["g++", *flags, *sources, "-o", str(program)], check=True)
    inputs = Inputs("sanitized", corpus_files())
    with subprocess.Popen(
        [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(TEXTS):
            raw = inputs.next()
            size = int.from_bytes(raw[:8], "little")
            text = raw[8 : 8 + min(size, len(raw))]
            process.stdin.write(
                struct.pack("=IQ", len(text), max(len(raw) - 8 - len(text), 0)) + text
            )
            if number % 8 == 0:
                inputs.renew()
        process.stdin.close()
        said = process.stdout.read().decode()
    assert process.returncode == 0, said
    texts, accepted = map(int, said.split())
    assert texts == TEXTS
    assert accepted > TEXTS // 20
