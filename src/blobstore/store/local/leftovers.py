"""Leftovers: folders of killed imports, with finished blobs that the next import takes over.

An import holds a lock on its folder, so a folder that can be locked has no owner. A lock on a
folder is not sent to a file server (Linux fs/nfs/dir.c: `nfs_dir_operations` has no ``flock``), so
there the import holds a lock on a file in its folder, which other machines see. Half-written
files in it are removed at once. Finished blobs are kept for a day, for the import that continues
the killed one, or until a clean-up removes them. So are beginnings of blobs that come from a
server, for which the next transfer asks for the rest.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from blobstore.errors import StorageError
from blobstore.io.copying import remove_tree
from blobstore.io.durable import (
    FOLDER_MODE,
    create_file,
    make_folder,
    may_be_shared,
    os_errors,
    remove_if_there,
)
from blobstore.io.ranges import close_quietly
from blobstore.names import Digest
from blobstore.store.local.locks import locked, take_lock
from blobstore.store.ports import Leftover

_KEPT_S = 24 * 3600
_UNOWNED = "new-"
_OWNER = "owner"
"""The file whose lock is held where a folder's lock stays on its machine."""
_PARTIAL = re.compile(r"partial-(?P<hex>[0-9a-f]{64})", re.ASCII)
_OURS = re.compile(r"(new|[0-9]+)-[0-9a-f]{16}", re.ASCII)


def remove_leftover(leftover: Leftover) -> None:
    """Remove it with its contents. Only for a holder of its lock, or of the store's alone.

    Raises: StorageError.
    """
    path = leftover.path
    with os_errors("remove", path):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            remove_if_there(path)


def partial_name(digest: Digest) -> str:
    """Return the name of a file with the first bytes of a blob."""
    return f"partial-{digest.hex}"


def make_owned_folder(parent: Path) -> tuple[Path, int]:
    """Return a new folder in ``parent``, and an open descriptor of it, or in it, with its lock.

    Raises: OSError.
    """
    try:
        return _make_owned(parent)
    except FileNotFoundError:  # another import saw a folder a day old: the clock has just jumped
        return _make_owned(parent)


def _make_owned(parent: Path) -> tuple[Path, int]:
    make_folder(parent)
    suffix = os.urandom(8).hex()
    # Under this name no process takes it for a leftover before it is locked.
    unowned = parent / f"{_UNOWNED}{suffix}"
    unowned.mkdir(mode=FOLDER_MODE)
    fd = -1
    try:
        if may_be_shared(unowned):
            fd = create_file(unowned / _OWNER)
        else:
            fd = os.open(unowned, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        take_lock(fd, fcntl.LOCK_EX, math.inf)  # another import's clean-up may hold it just now
        return unowned.rename(parent / f"{os.getpid()}-{suffix}"), fd
    except BaseException:
        if fd >= 0:
            close_quietly(fd)
        with suppress(OSError):
            remove_tree(unowned)
        raise


@contextmanager
def owned_folder(parent: Path) -> Iterator[Path]:
    """Make a folder of this process in ``parent``, and remove it with its contents at the end.

    What killed processes left there is cleaned first. Raises: StorageError.
    """
    Leftovers(parent).clean()
    with os_errors("write to the store", parent):
        folder, fd = make_owned_folder(parent)
    try:
        yield folder
    finally:
        close_quietly(fd)  # NFS and FUSE keep an open file under another name
        with suppress(OSError):  # the next one removes it
            remove_tree(folder)


class Leftovers:
    """The folders under ``parent`` that no process owns."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def find(self, name: str) -> Path | None:
        """Return the file of that name in a folder without an owner, or None."""
        for folder in self._folders():
            path = folder / name
            with suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode):
                    return path
        return None

    def names(self) -> set[str]:
        """Return the names of reusable files, in all folders, owned or not."""
        found: set[str] = set()
        for folder in self._folders():
            with suppress(OSError):
                found.update(path.name for path in folder.iterdir() if _is_of_use(path.name))
        return found

    def take(self, path: Path, folder: Path) -> bool:
        """Move a file into ``folder``, which is the caller's.

        Return False if it is gone, or its folder has an owner. Raises: StorageError.
        """
        with _owned(path.parent) as is_mine, suppress(FileNotFoundError):
            if is_mine:
                with os_errors("take over", path):
                    path.rename(folder / path.name)
                return True
        return False

    def clean(self) -> None:
        """Remove half-written files, and everything that is a day old. Failures are ignored."""
        for folder in self._folders():
            is_left = False
            with _owned(folder) as is_mine, suppress(OSError, StorageError):
                is_left = is_mine and not (folder.name.startswith(_UNOWNED) and is_young(folder))
                for leftover in list(_stale(folder, _KEPT_S)) if is_left else ():
                    remove_leftover(leftover)
            if is_left:  # no process owns it again: its name is random
                with suppress(OSError):  # NFS and FUSE let it go when the lock's file is closed
                    folder.rmdir()

    def stale(self, kept_s: float) -> Iterator[Leftover]:
        """Yield what killed imports left: finished blobs only if they are older than ``kept_s``."""
        for folder in self._folders():
            if _OURS.fullmatch(folder.name):
                with _owned(folder) as is_mine, suppress(OSError):
                    if is_mine:
                        yield from _stale(folder, kept_s)

    def finished(self) -> Iterator[Digest]:
        """Yield the digests of the finished blobs in all folders, owned or not."""
        for folder in self._folders():
            with suppress(OSError):
                found = (Digest.from_file_name(path.name) for path in folder.iterdir())
                yield from filter(None, found)

    def _folders(self) -> Iterator[Path]:
        with suppress(OSError):
            yield from sorted(path for path in self._parent.iterdir() if not path.is_symlink())


def _owned(folder: Path) -> AbstractContextManager[bool]:
    """Hold a folder's lock; yield False if it has an owner."""
    owner = folder / _OWNER
    if os.path.lexists(owner):
        return locked(owner, os.O_RDWR | os.O_NONBLOCK, fcntl.LOCK_EX)
    return locked(folder, os.O_DIRECTORY, fcntl.LOCK_EX)


def _is_of_use(name: str) -> bool:
    return Digest.from_file_name(name) is not None or _PARTIAL.fullmatch(name) is not None


def is_young(path: Path, kept_s: float = _KEPT_S) -> bool:
    """Return True if a file or folder changed in the last ``kept_s`` seconds. Raises: OSError."""
    return path.lstat().st_mtime > time.time() - kept_s


def _stale(folder: Path, kept_s: float) -> Iterator[Leftover]:
    paths = sorted(folder.iterdir())
    others = [path for path in paths if not _is_of_use(path.name)]
    if len(others) == len(paths) or not is_young(folder, kept_s):
        yield Leftover(folder, sum(map(_nbytes, paths)), "left by a killed import")
        return
    for path in others:
        if path.name == _OWNER:
            continue  # the rest is taken over while its lock is held
        yield Leftover(path, _nbytes(path), "left unfinished by a killed import")


def _nbytes(path: Path) -> int:
    return path.lstat().st_size
