"""The kernels and SHA-256 for arm64, under an emulator, give the same bits as this machine's.

It takes Debian's g++-aarch64-linux-gnu and qemu-user; without them the test is skipped with ``NOT
SHOWN``.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support import ROOT

SOURCE = ROOT / "src" / "blobstore"
LEVELS = {
    "plain": (),
    "x86_64_v3": ("-march=x86-64-v3",),
    "x86_64_v4": ("-march=x86-64-v4", "-w"),
    "neon": (),
    "sha_ni": ("-msse4.1", "-msha"),
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4", "-w"),
    "armv8": ("-march=armv8-a+crypto",),
}


def built(
    folder: Path,
    compiler: str,
    room: str,
    targets: tuple[str, ...],
    *more: str,
) -> Path:
    """Return the program ``room``.cpp with the files ``targets``, as CMakeLists.txt says."""
    folder.mkdir()
    place = SOURCE / ("hashing" if room == "sha256" else "kernels")
    flags = [compiler, "-std=c++20", "-O3", "-ffp-contract=off", "-Wno-psabi", f"-I{place}", *more]
    objects = []
    for target in targets:
        objects.append(str(folder / f"{target}.o"))
        subprocess.run(
            [*flags, *LEVELS[target], "-c", str(place / f"{target}.cpp"), "-o", objects[-1]],
            check=True,
        )
    program = folder / "program"
    main = ROOT / "tests" / "cross" / f"{room}.cpp"
    subprocess.run([*flags, str(main), *objects, "-o", str(program)], check=True)
    return program


def hashes(*command: str | Path) -> dict[str, str]:
    lines = subprocess.check_output(command, text=True).splitlines()
    return dict(line.split() for line in lines)


def require(*tools: str) -> None:
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"NOT SHOWN: arm64 equals x86; there is no {', '.join(missing)}")


def there_and_here(
    tmp_path: Path, room: str, x86: tuple[str, ...], arm: tuple[str, ...]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the hashes of both processors."""
    require("g++", "aarch64-linux-gnu-g++", "qemu-aarch64")
    here = built(tmp_path / "x86", "g++", room, x86, "-static")
    there = built(tmp_path / "arm64", "aarch64-linux-gnu-g++", room, arm, "-static")
    return hashes("qemu-aarch64", there), hashes(here)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_arm64_gives_the_bits_of_x86(tmp_path: Path) -> None:
    there, here = there_and_here(
        tmp_path, "kernels", ("plain", "x86_64_v3", "x86_64_v4"), ("plain", "neon")
    )
    assert set(there) == {"plain", "neon"}
    assert len({*here.values(), *there.values()}) == 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_arm64_gives_the_digests_of_x86(tmp_path: Path) -> None:
    there, here = there_and_here(
        tmp_path, "sha256", ("plain", "sha_ni", "avx2", "avx512"), ("plain", "armv8")
    )
    assert set(there) == {"plain-1", "armv8-1", "armv8-2", "armv8-4"}
    assert len({*here.values(), *there.values()}) == 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_sanitizers_find_nothing_in_sha256(tmp_path: Path) -> None:
    require("g++")
    methods = ("plain", "sha_ni", "avx2", "avx512")
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
    assert hashes(built(tmp_path / "sanitized", "g++", "sha256", methods, *flags))
