"""Placing: where a report's files go. Each appears when it is complete, and durable."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from blobstore.errors import UsageError
from blobstore.io.durable import add_file, check_regular, make_folder, os_errors, replace_file


def check_place(path: str, *, force: bool) -> None:
    """Check where a file shall go, before a minute of measuring.

    Raises: UsageError if it exists, unless ``force``, for ``-``, or if the path ends with a slash;
    StorageError if something other than a file is there; MissingFileError without its folder.
    """
    if path == "-":
        raise UsageError("a page is not written to standard output", hint="Name a file.")
    if not Path(path).name or path.endswith("/"):
        hint = "Name a file, such as report.html."
        raise UsageError(f"{path!r} is not the path of a file", path=path, hint=hint)
    with os_errors("write", path):
        os.stat(f"{Path(path).parent}/.")  # noqa: PTH116  # a file there is an error
        with suppress(FileNotFoundError):
            os.lstat(path)  # the name may be too long
        check_regular(path)
    if not force and os.path.lexists(path):
        raise _exists(path)


def check_folder(path: str) -> None:
    """Raise StorageError if something other than a folder is there."""
    with os_errors("make the folder", path):
        if os.path.lexists(path):
            os.stat(f"{path}/.")  # noqa: PTH116  # a file there is an error


def place_file(path: Path, data: bytes, *, force: bool = False) -> None:
    """Write a file that appears when it is complete. With ``force`` it may replace another.

    Raises: as `check_place`, also if another process has made the file meanwhile; StorageError.
    """
    check_place(os.fspath(path), force=force)
    temporary = path.with_name(f".{os.urandom(8).hex()}.writing")
    with os_errors("write", path):
        if force:
            replace_file(path, data, temporary=temporary, syncs=True)
            return
        try:
            add_file(path, data, temporary=temporary, syncs=True)
        except FileExistsError as error:
            raise _exists(os.fspath(path)) from error


def _exists(path: str) -> UsageError:
    hint = "Use force=True to replace it."
    return UsageError(f"{path} already exists", path=path, hint=hint)


def place_folder(path: Path) -> None:
    """Make a folder, if it is missing. Raises: StorageError."""
    with os_errors("make the folder", path):
        make_folder(path)
