"""The machine that figures depend on, in a few lines for the head of a page."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import blobstore
from blobstore import hashing, kernels
from blobstore.io.workers import threads

CPUINFO = Path("/proc/cpuinfo")
FLAGS = ("sha_ni", "avx512f", "avx2", "sha2", "asimd")
"""What the kernels and SHA-256 use, by the names of /proc/cpuinfo."""


def machine(work: Path, packages: Iterable[str] = ("mlx", "mlx-lm", "numpy")) -> str:
    """Return processor, load, disk of the folder ``work``, and versions."""
    facts = cpuinfo()
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return (
        f"{facts.get('model name', platform.machine())}"
        f" ({' '.join(flag for flag in FLAGS if flag in flags) or 'no known flags'})"
        f", {threads(None)} cores, "
        f"load {os.getloadavg()[0]:.1f}, {memory_gb:.0f} GB of memory, "
        f"{platform.system()} {platform.release()}\n"
        f"disk: {disk_of(work)}\n"
        f"blobstore {blobstore.__version__} (kernels: {kernels.active().name}; "
        f"SHA-256: {hashing.in_use()}), Python {platform.python_version()}, {versions(packages)}"
    )


def cpuinfo() -> dict[str, str]:
    """Return what Linux says about the first processor; empty elsewhere."""
    if not CPUINFO.exists():
        return {}
    first = CPUINFO.read_text().split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def disk_of(work: Path) -> str:
    """Return device, file system and free space of a folder's disk."""
    shown = subprocess.run(
        ["df", "-PTh", work], capture_output=True, text=True, check=True
    ).stdout.splitlines()[1]
    device, kind, _, _, free, *_ = shown.split()
    return f"{device}, {kind}, {free} free"


def versions(packages: Iterable[str]) -> str:
    """Return the versions of those packages that are installed."""
    found = []
    for name in packages:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)
