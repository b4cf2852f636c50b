"""Rewriting: a new file with another header and the same data, put in the old one's place when it is complete."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from blobstore.metadata.text import PREFIX
from blobstore.ranges import FileReader, close_quietly
from blobstore.store.copying import copy_range
from blobstore.store.files import create_file, os_errors, remove_if_there, sync, sync_folder, write_all_at


def rewrite(source: FileReader, path: Path, text: bytes, data_start: int, told: Callable[[int], object]) -> int:
    """Replace the file at ``path``, open as ``source`` and locked, by one with that header text; return the bytes copied.

    Mode, owner and extended attributes are the old file's, where the system lets us. Durable. Raises: StorageError,
    CorruptDataError when the old file changes meanwhile; it stays as it is then.
    """
    # One name, which only the holder of the file's lock uses: the next edit removes what a killed one left.
    new = path.with_name(f".{path.name}.blobstore-new")
    try:
        with os_errors("create", new):
            remove_if_there(new)
            target = create_file(new)
        try:
            with os_errors("write", new):
                write_all_at(target, 0, memoryview(len(text).to_bytes(PREFIX, "little") + text))
            copy_range(source, data_start, target, new, PREFIX + len(text), source.size - data_start, told)
            with os_errors("write", new):
                _take_attributes(source.fileno(), target)
                sync(target)
        finally:
            close_quietly(target)
        source.check_unchanged()
        with os_errors("replace", path):
            new.rename(path)
    except BaseException:
        with suppress(OSError):
            remove_if_there(new)
        raise
    with os_errors("replace", path):
        sync_folder(path.parent)
    return source.size - data_start


def _take_attributes(old: int, new: int) -> None:
    status = os.fstat(old)
    if (status.st_uid, status.st_gid) != (os.fstat(new).st_uid, os.fstat(new).st_gid):
        with suppress(PermissionError):  # only root gives files away
            os.fchown(new, status.st_uid, status.st_gid)
    if hasattr(os, "listxattr"):
        for name in os.listxattr(old):
            with suppress(OSError):  # some are the system's own
                os.setxattr(new, name, os.getxattr(old, name))
    os.fchmod(new, stat.S_IMODE(status.st_mode))
