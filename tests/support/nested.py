"""Folders in folders in folders: deeper than Python recurses, and than a path may be long."""

from __future__ import annotations

import os
from pathlib import Path

DEEP = 1050


def nest(folder: Path, depth: int = DEEP, name: str = "deep") -> Path:
    """Make nested folders in ``folder`` with a file in the last one; return the first."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=inner)
        outer, inner = inner, os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=inner)
        os.close(outer)
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=inner))
    os.close(inner)
    return folder / name
