"""Placing: where a report's files go. Each appears when it is complete."""

from __future__ import annotations

import os
from pathlib import Path

from blobstore.errors import UsageError
from blobstore.io.durable import make_folder, os_errors
from blobstore.io.small_files import replace_file


def check_absent(path: Path) -> None:
    """Raise UsageError if a file, a folder or a link is there."""
    if os.path.lexists(path):
        hint = "Use force=True to replace it."
        raise UsageError(f"{path} already exists", path=str(path), hint=hint)


def place_file(path: Path, data: bytes, *, force: bool = False) -> None:
    """Write a file that appears when it is complete.

    Raises: UsageError if it exists, unless ``force``; StorageError.
    """
    if not force:
        check_absent(path)
    with os_errors("write", path):
        replace_file(path, data)


def place_folder(path: Path) -> None:
    """Make a folder, if it is missing. Raises: StorageError."""
    with os_errors("make the folder", path):
        make_folder(path)
