"""Trees: folders of ours removed with all that is in them, however deep others made them.

`shutil.rmtree` recurses (Python 3.11), so a thousand folders in one another end it with a RecursionError, and deeper ones
have paths that the system refuses. Here nothing recurses and no path is longer than three names: what lies in a folder's
folders is moved up into the folder itself before it is removed.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from blobstore.ranges import close_quietly

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def remove_tree(path: Path) -> None:
    """Remove a folder and all that is in it. Links are removed, not followed, and nothing but folders is opened.

    Nothing happens when it is gone. Raises: OSError; what could not be removed is still in the folder then.
    """
    try:
        top = os.open(path, _FOLDER)
    except FileNotFoundError:
        return
    try:
        while folders := _remove_files(top):
            for name in folders:
                _remove_folder(name, top)
    finally:
        close_quietly(top)
    path.rmdir()


def _remove_folder(name: str, top: int) -> None:
    """Remove a folder in ``top``; the folders in it are in ``top`` afterwards, under other names."""
    folder = os.open(name, _FOLDER, dir_fd=top)
    try:
        for inner in _remove_files(folder):
            os.rename(inner, secrets.token_hex(8), src_dir_fd=folder, dst_dir_fd=top)
    finally:
        close_quietly(folder)
    os.rmdir(name, dir_fd=top)


def _remove_files(folder: int) -> list[str]:
    """Remove all that is not a folder from an open folder; return the names of its folders."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in found if is_folder]
