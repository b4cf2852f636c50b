"""Leftovers: the folders of imports that were killed, and the finished blobs in them, which the next import takes over.

An import holds a lock on its folder, so a folder that can be locked has no owner any more. Half-written files in it are
removed at once; finished ones are kept for a day, for the import that goes on with them.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blobstore.digest import Digest
from blobstore.store.files import FOLDER_MODE, make_folder, os_errors

_KEPT_S = 24 * 3600
_UNOWNED = "new-"


def make_owned_folder(parent: Path) -> tuple[Path, int]:
    """Return a new folder in ``parent`` and an open descriptor of it that holds its lock. Raises: OSError."""
    make_folder(parent)
    # Under this name nobody takes it for a leftover before it is locked.
    unowned = parent / f"{_UNOWNED}{secrets.token_hex(8)}"
    unowned.mkdir(mode=FOLDER_MODE)
    fd = -1
    try:
        fd = os.open(unowned, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)  # not at once: another import that cleans up may look at it just now
        return unowned.rename(parent / f"{os.getpid()}-{secrets.token_hex(8)}"), fd
    except BaseException:
        if fd >= 0:
            os.close(fd)
        with suppress(OSError):
            unowned.rmdir()
        raise


class Leftovers:
    """What lies under ``parent`` and is nobody's."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def find(self, digest: Digest) -> Path | None:
        """Return a finished blob of that digest in a folder without an owner, or None."""
        found = (folder / digest.file_name for folder in self._folders())
        return next((path for path in found if path.is_file() and not path.is_symlink()), None)

    def take(self, path: Path, folder: Path) -> bool:
        """Move a finished blob into ``folder``, which is the caller's; return False when it is gone or another's.

        Raises: StorageError.
        """
        with _owned(path.parent) as is_mine:
            if not is_mine:
                return False
            with os_errors("take over", path):
                try:
                    path.rename(folder / path.name)
                except FileNotFoundError:
                    return False
            return True

    def clean(self) -> None:
        """Remove half-written files, and what has been lying for a day."""
        for folder in self._folders():
            with _owned(folder) as is_mine, suppress(OSError):
                if is_mine:
                    _clean(folder)

    def _folders(self) -> Iterator[Path]:
        with suppress(OSError):
            yield from sorted(path for path in self._parent.iterdir() if not path.is_symlink())


def _clean(folder: Path) -> None:
    old = time.time() - _KEPT_S
    is_old = folder.stat().st_mtime < old
    if not folder.is_dir() or (folder.name.startswith(_UNOWNED) and not is_old):
        return
    finished = [path for path in folder.iterdir() if Digest.from_file_name(path.name) is not None]
    if is_old or not finished:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path not in finished:
            path.unlink(missing_ok=True)


@contextmanager
def _owned(folder: Path) -> Iterator[bool]:
    """Yield True, and hold the folder's lock meanwhile, when it has no owner."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)
