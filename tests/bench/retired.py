"""Places that benchmarks write to, each new.

After many deletions ext4 without a journal makes files slowly for about a minute: it passes over
inodes that were just deleted, one by one (torvalds/linux fs/ext4/ialloc.c `recently_deleted`). So
what a run wrote is not deleted before the next one. It is moved away, and its files are emptied.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

RETIRED = "retired"
_numbers = itertools.count()


def retire(folder: Path) -> None:
    """Move a folder to ``retired`` beside it, if it is there, and free the space of its files."""
    if not folder.exists():
        return
    place = folder.parent / RETIRED / f"{os.getpid()}-{next(_numbers)}"
    place.parent.mkdir(exist_ok=True)
    folder.rename(place)
    for path in place.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.truncate(path, 0)
