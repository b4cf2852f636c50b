"""The folder of an export: written under another name beside it, and renamed when everything in it is on the disk.

So a folder of that name is a whole export or none. The other name is always the same, and its lock is held while it is
written: two exports into one folder do not mix, and what a killed one left is removed by the next.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blobstore.errors import BusyError, StorageError, UsageError, quoted
from blobstore.ranges import close_quietly
from blobstore.store import Store
from blobstore.store.files import (
    FOLDER_MODE,
    listed,
    make_folder,
    os_errors,
    sync,
    sync_file_system,
    sync_folder,
    syncs_whole,
)
from blobstore.store.trees import remove_tree

_HINT = "Name a folder that does not exist, or an empty one."


class Target:
    """The folder that an export shall become."""

    def __init__(self, path: str | os.PathLike[str], store: Store) -> None:
        """Check the folder. Raises: StorageError unless it is an empty folder; UsageError when it is in the store."""
        try:
            with os_errors("access", os.fspath(path)):
                self.path = Path(path).expanduser().resolve()
                is_free = not os.path.lexists(self.path) or (self.path.is_dir() and not any(self.path.iterdir()))
                is_mount = self.path.is_mount()
        except (ValueError, RuntimeError) as error:  # a NUL in the path, an unknown ~user, a loop of links
            raise StorageError(f"can't write to {quoted(os.fspath(path))}: {error}", path=os.fspath(path)) from error
        if self.path == store.root or store.root in self.path.parents:
            message = f"{self.path} is in the store {store.root}, where only blobs and manifests may be"
            raise UsageError(message, path=str(self.path))
        if is_mount:
            hint = f"Export into a folder of it, such as {self.path / 'model'}."
            raise StorageError(
                f"{self.path} is where a file system is mounted: no other folder can take its place", hint=hint
            )
        if not is_free:
            raise _taken(self.path)

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """Yield a new folder beside the target's; when the block ends well it is made durable and takes the target's place.

        Raises: BusyError when another export into the same folder is at work; StorageError. Nothing is left then.
        """
        staging = self.path.with_name(f".{self.path.name}.blobstore-export")
        with os_errors("write to", staging):
            make_folder(staging.parent)
            fd = _take(staging)
        try:
            with os_errors("write to", staging):
                _clear(staging)
                is_enough = syncs_whole(fd)
            yield staging
            with os_errors("write to", staging):
                _sync_all(staging, fd if is_enough else -1)
            self._link(staging)
        except BaseException:
            with suppress(OSError):
                remove_tree(staging)
            raise
        finally:
            close_quietly(fd)

    def _link(self, staging: Path) -> None:
        try:
            staging.rename(self.path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _taken(self.path) from error
            with os_errors("write to", self.path):
                raise
        with os_errors("write to", self.path.parent):
            sync_folder(self.path.parent)


def _take(staging: Path) -> int:
    """Return the folder, made if need be, open and locked."""
    with suppress(FileExistsError):
        staging.mkdir(mode=FOLDER_MODE)
    fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that held the lock may have renamed or removed the folder just now.
        is_there = os.path.samestat(os.fstat(fd), staging.stat(follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        is_there = False
    except BaseException:
        close_quietly(fd)
        raise
    if not is_there:
        close_quietly(fd)
        raise BusyError(f"another export into the same folder is at work ({staging})", path=str(staging))
    return fd


def _clear(staging: Path) -> None:
    for path in staging.iterdir():
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            path.unlink()


def _sync_all(staging: Path, fd: int) -> None:
    """Make all files and names durable: by one call where there is one (``fd`` is not -1), else one by one."""
    if fd >= 0:
        sync_file_system(fd)
        return
    waiting = [staging]
    while waiting:  # a stored name may have two thousand folders in it: no recursion
        folder = waiting.pop()
        for entry in listed(folder):
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            else:
                _sync_file(Path(entry.path))
        sync_folder(folder)


def _sync_file(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        sync(file)
    finally:
        close_quietly(file)


def _taken(path: Path) -> StorageError:
    return StorageError(f"{path} already exists and is not an empty folder", path=str(path), hint=_HINT)
