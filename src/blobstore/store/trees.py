"""Trees: folders of ours removed with all that is in them, however deep others made them.

`shutil.rmtree` recurses (Python 3.11), so a thousand folders in one another end it with a RecursionError, and deeper ones
have paths that the system refuses. Here nothing recurses, no path is longer than a name, and two folders are open at most.
Nor is a folder renamed: overlayfs refuses that for one that lies in a lower layer (EXDEV; see trash.py).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from blobstore.ranges import close_quietly

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def remove_tree(path: Path) -> None:
    """Remove a folder and all that is in it. Links are removed, not followed, and nothing but folders is opened.

    Nothing happens when it is gone. Raises: OSError; what could not be removed is still in the folder then.
    """
    try:
        folder = os.open(path, _FOLDER)
    except FileNotFoundError:
        return
    above: list[tuple[tuple[int, int], list[str]]] = []  # each folder on the way here, and its folders that are left
    try:
        left = _remove_files(folder)
        while left or above:
            if left:
                above.append((_identity(folder), left))
                folder = _moved_to(left[-1], folder)
                left = _remove_files(folder)
            else:
                identity, left = above.pop()
                folder = _moved_to("..", folder)
                if _identity(folder) != identity:  # else what lies elsewhere would be removed
                    raise OSError(errno.EBUSY, "a folder in it was moved while it was removed")
                os.rmdir(left.pop(), dir_fd=folder)
    finally:
        close_quietly(folder)
    path.rmdir()


def _moved_to(name: str, folder: int) -> int:
    """Return an open folder that is in ``folder``, which is closed then."""
    found = os.open(name, _FOLDER, dir_fd=folder)
    close_quietly(folder)
    return found


def _identity(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino


def _remove_files(folder: int) -> list[str]:
    """Remove all that is not a folder from an open folder; return the names of its folders."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in found if is_folder]
