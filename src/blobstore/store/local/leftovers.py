"""Leftovers: the folders of imports that were killed, and the finished blobs in them, which the next import takes over.

An import holds a lock on its folder, so a folder that can be locked has no owner any more.
Half-written files in it are removed at once; finished ones are kept for a day, for the import that
goes on with them, or until a clean-up wants them.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.io.copying import remove_tree
from blobstore.io.durable import FOLDER_MODE, make_folder, os_errors, remove_if_there
from blobstore.io.ranges import close_quietly
from blobstore.names import Digest

_KEPT_S = 24 * 3600
_UNOWNED = "new-"
_OURS = re.compile(r"(new|[0-9]+)-[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file or folder of ours that is of no use any more, its bytes, and why."""

    path: Path
    nbytes: int
    reason: str

    def remove(self) -> None:
        """Remove it, with what is in it. Only for a holder of the store's exclusive lock.

        Raises: StorageError.
        """
        with os_errors("remove", self.path):
            if self.path.is_dir() and not self.path.is_symlink():
                remove_tree(self.path)
            else:
                remove_if_there(self.path)


def make_owned_folder(parent: Path) -> tuple[Path, int]:
    """Return a new folder in ``parent`` and an open descriptor of it that holds its lock.

    Raises: OSError.
    """
    try:
        return _make_owned(parent)
    except FileNotFoundError:  # another import saw a folder a day old: the clock has just jumped
        return _make_owned(parent)


def _make_owned(parent: Path) -> tuple[Path, int]:
    make_folder(parent)
    suffix = secrets.token_hex(8)
    # Under this name no process takes it for a leftover before it is locked.
    unowned = parent / f"{_UNOWNED}{suffix}"
    unowned.mkdir(mode=FOLDER_MODE)
    fd = -1
    try:
        fd = os.open(unowned, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(
            fd, fcntl.LOCK_EX
        )  # not at once: another import that cleans up may hold it just now
        return unowned.rename(parent / f"{os.getpid()}-{suffix}"), fd
    except BaseException:
        if fd >= 0:
            close_quietly(fd)
        with suppress(OSError):
            unowned.rmdir()
        raise


class Leftovers:
    """The folders under ``parent`` that no process owns."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def find(self, digest: Digest) -> Path | None:
        """Return a finished blob of that digest in a folder without an owner, or None."""
        found = (folder / digest.file_name for folder in self._folders())
        return next((path for path in found if _is_regular(path)), None)

    def take(self, path: Path, folder: Path) -> bool:
        """Move a finished blob into ``folder``, which is the caller's.

        Return False when it is gone or another's.

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

    def stale(self, kept_s: float) -> Iterator[Leftover]:
        """Yield what an import left that is at work no more: finished blobs only when they lie longer than ``kept_s``."""
        for folder in self._folders():
            if _OURS.fullmatch(folder.name):
                with _owned(folder) as is_mine, suppress(OSError):
                    if is_mine:
                        yield from _stale(folder, kept_s)

    def finished(self) -> Iterator[Digest]:
        """Yield the digests of the finished blobs that lie there, with an owner or without."""
        for folder in self._folders():
            with suppress(OSError):
                yield from (
                    digest
                    for path in folder.iterdir()
                    if (digest := Digest.from_file_name(path.name))
                )

    def _folders(self) -> Iterator[Path]:
        with suppress(OSError):
            yield from sorted(path for path in self._parent.iterdir() if not path.is_symlink())


def _is_regular(path: Path) -> bool:
    """Return True for a regular file that is reached by no link, False where that can't be told."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _stale(folder: Path, kept_s: float) -> Iterator[Leftover]:
    finished = {path for path in folder.iterdir() if Digest.from_file_name(path.name) is not None}
    others = set(folder.iterdir()) - finished
    if not finished or folder.stat().st_mtime <= time.time() - kept_s:
        nbytes = sum(path.lstat().st_size for path in finished | others)
        yield Leftover(folder, nbytes, "an import that was killed left it")
        return
    for path in sorted(others):
        yield Leftover(path, path.lstat().st_size, "an import that was killed left it unfinished")


def _clean(folder: Path) -> None:
    old = time.time() - _KEPT_S
    is_old = folder.stat().st_mtime < old
    if not folder.is_dir() or (folder.name.startswith(_UNOWNED) and not is_old):
        return
    finished = [path for path in folder.iterdir() if Digest.from_file_name(path.name) is not None]
    if is_old or not finished:
        remove_tree(folder)
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
        close_quietly(fd)
