"""Markdown tables, printed row by row, and the machine that their figures depend on."""

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import blobstore
from blobstore import hashing, kernels
from blobstore.io.workers import threads

FLAGS = ("sha_ni", "avx512f", "avx2", "sha2", "asimd")
"""What the kernels and SHA-256 use, by the names of /proc/cpuinfo."""


def show(cells: Iterable[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def table(*headings: str) -> None:
    show(headings)
    show("---" for _ in headings)


def machine(work: Path, packages: Iterable[str] = ("mlx", "mlx-lm", "numpy")) -> str:
    """Return processor, load, disk of the folder ``work``, and versions."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (one.partition(":") for one in lines)}
    has = set((facts.get("flags") or facts.get("Features") or "").split())
    command = ["df", "-PTh", str(work)]
    disk = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    device, kind, _, _, free, *_ = disk[1].split()
    return (
        f"{facts.get('model name', platform.machine())} "
        f"({' '.join(flag for flag in FLAGS if flag in has)}), {threads(None)} cores, "
        f"load {os.getloadavg()[0]:.1f}, {platform.system()} {platform.release()}\n"
        f"disk: {device}, {kind}, {free} free\n"
        f"blobstore {blobstore.__version__} (kernels: {kernels.active().name}; "
        f"SHA-256: {hashing.in_use()}), Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in packages)
    )
