"""The kernels and SHA-256 for arm64, under an emulator, give the same bits as this machine's.

It takes Debian's g++-aarch64-linux-gnu and qemu-user; without them the test is skipped with ``NOT
SHOWN``.
"""

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
KERNELS = ("plain", "x86_64_v3", "x86_64_v4")
HASHES = ("plain", "sha_ni", "avx2", "avx512")
ARM = "aarch64-linux-gnu-g++"

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def hashes(
    folder: Path, compiler: str, room: str, targets: tuple[str, ...], *more: str
) -> dict[str, str]:
    """Return what ``room``.cpp with the files ``targets`` prints, built as CMakeLists.txt says."""
    emulator = ["qemu-aarch64"] if compiler == ARM else []
    if missing := [tool for tool in (compiler, *emulator) if shutil.which(tool) is None]:
        pytest.skip(f"NOT SHOWN: arm64 equals x86; there is no {', '.join(missing)}")
    folder.mkdir()
    place = SOURCE / ("hashing" if room == "sha256" else "kernels")
    flags = [compiler, "-std=c++20", "-O3", "-ffp-contract=off", "-Wno-psabi", f"-I{place}", *more]
    objects = [str(folder / f"{target}.o") for target in targets]
    for target, output in zip(targets, objects, strict=True):
        source = str(place / f"{target}.cpp")
        subprocess.run([*flags, *LEVELS[target], "-c", source, "-o", output], check=True)
    program = str(folder / "program")
    main = str(ROOT / "tests" / "cross" / f"{room}.cpp")
    subprocess.run([*flags, main, *objects, "-o", program], check=True)
    lines = subprocess.check_output([*emulator, program], text=True).splitlines()
    return dict(line.split() for line in lines)


@pytest.mark.parametrize(
    ("room", "here", "there", "methods"),
    [
        ("kernels", KERNELS, ("plain", "neon"), {"plain", "neon"}),
        ("sha256", HASHES, ("plain", "armv8"), {"plain-1", "armv8-1", "armv8-2", "armv8-4"}),
    ],
)
def test_arm64_gives_the_bits_of_x86(
    tmp_path: Path, room: str, here: tuple[str, ...], there: tuple[str, ...], methods: set[str]
) -> None:
    on_arm = hashes(tmp_path / "arm64", ARM, room, there, "-static")
    on_x86 = hashes(tmp_path / "x86", "g++", room, here, "-static")
    assert set(on_arm) == methods
    assert len({*on_arm.values(), *on_x86.values()}) == 1


def test_sanitizers_find_nothing_in_sha256(tmp_path: Path) -> None:
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
    assert hashes(tmp_path / "sanitized", "g++", "sha256", HASHES, *flags)
