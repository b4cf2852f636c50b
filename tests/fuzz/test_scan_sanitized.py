"""The scanners under the sanitizers: `python -m pytest -m long tests/fuzz`."""

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
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=address,undefined", "-DFROM_STDIN"]
    sources = [str(ROOT / "tests" / "fuzz" / "scan.cpp"), str(SCANNER / "scan.cpp")]
    line = ["g++", *flags, "-fno-sanitize-recover=all", f"-I{SCANNER}", *sources]
    subprocess.run([*line, "-o", str(program)], check=True)
    inputs = Inputs("sanitized", corpus_files())
    with (tmp_path / "texts").open("w+b") as texts:
        for number in range(TEXTS):
            raw = inputs.next()
            size = int.from_bytes(raw[:8], "little")
            text = raw[8 : 8 + min(size, len(raw))]
            texts.write(struct.pack("=IQ", len(text), max(len(raw) - 8 - len(text), 0)) + text)
            if number % 8 == 0:
                inputs.renew()
        texts.seek(0)
        done = subprocess.run([program], stdin=texts, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, accepted = map(int, done.stdout.split())
    assert count == TEXTS
    assert accepted > TEXTS // 20
