"""The kernels for arm64, under an emulator, give the same bits as this machine's.

It takes Debian's g++-aarch64-linux-gnu and qemu-user; without them the test is skipped with ``NOT
SHOWN``.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support import ROOT

KERNELS = ROOT / "src" / "blobstore" / "kernels"
PROGRAM = ROOT / "tests" / "cross" / "kernels.cpp"
LEVELS = {
    "plain": (),
    "x86_64_v3": ("-march=x86-64-v3",),
    "x86_64_v4": ("-march=x86-64-v4", "-w"),
    "neon": (),
}


def built(folder: Path, compiler: str, targets: tuple[str, ...]) -> Path:
    """Return the program with the kernels of ``targets``, compiled as CMakeLists.txt says."""
    folder.mkdir()
    flags = [compiler, "-std=c++20", "-O3", "-ffp-contract=off", "-Wno-psabi", f"-I{KERNELS}"]
    objects = []
    for target in targets:
        objects.append(str(folder / f"{target}.o"))
        subprocess.run(
            [*flags, *LEVELS[target], "-c", str(KERNELS / f"{target}.cpp"), "-o", objects[-1]],
            check=True,
        )
    program = folder / "program"
    subprocess.run([*flags, "-static", str(PROGRAM), *objects, "-o", str(program)], check=True)
    return program


def hashes(*command: str | Path) -> dict[str, str]:
    lines = subprocess.check_output(command, text=True).splitlines()
    return dict(line.split() for line in lines)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_arm64_gives_the_bits_of_x86(tmp_path: Path) -> None:
    tools = ("g++", "aarch64-linux-gnu-g++", "qemu-aarch64")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"NOT SHOWN: arm64 equals x86; there is no {', '.join(missing)}")
    here = hashes(built(tmp_path / "x86", "g++", ("plain", "x86_64_v3", "x86_64_v4")))
    there = hashes(
        "qemu-aarch64", built(tmp_path / "arm64", "aarch64-linux-gnu-g++", ("plain", "neon"))
    )
    assert set(there) == {"plain", "neon"}
    assert len({*here.values(), *there.values()}) == 1
