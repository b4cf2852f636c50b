"""Locks of a store (``flock``), and the folders of blobs that they protect.

The kernel releases a lock when its holder dies, so a lock is never stale. ``.blobstore/lock``: many
writers share it, a clean-up holds it alone, and opening a model shares it if it can.
``.blobstore/names``: exclusive for the moment in which a manifest is checked and then linked or
removed, by processes that share the other lock. Ollama takes neither.

Holders are asked of the kernel. Linux lists every flock in /proc/locks (proc_locks(5)). Other
systems do not, and holders on other machines are not found.

A session writes to its folder under ``.blobstore/tmp/``, and holds a lock on it, so a folder that
can be locked has no owner. A lock on a folder is not sent to a file server (Linux fs/nfs/dir.c:
`nfs_dir_operations` has no ``flock``), so there the session holds a lock on a file in its folder,
which other machines see. The next session moves the finished blobs of a killed one to
``.blobstore/left/``, and removes everything else. Their bytes may never have been written to the
disk, so they are hashed before they are used. They are removed after a day.

``.blobstore/kept/`` has blobs that were made for a later session, complete, hashed and durable.
Many machines make the blobs of one plan, and one of them publishes the model, perhaps days later. A
clean-up spares them for a week. In ``blobs/`` a starting Ollama would delete them.
"""

import fcntl
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blobstore.errors import BusyError, StorageError
from blobstore.io.copying import remove_tree
from blobstore.io.durable import (
    FILE_MODE,
    FOLDER_MODE,
    create_file,
    list_folder,
    make_folder,
    may_be_shared,
    os_errors,
    remove_if_there,
    sync_folder,
)
from blobstore.io.ranges import close_quietly
from blobstore.names import Digest
from blobstore.store.local.blobs import FinishedBlob, renew
from blobstore.store.ports import Leftover

_FLOCK = re.compile(
    r"[0-9]+: FLOCK +[A-Z]+ +(READ|WRITE) +(?P<pid>[0-9]+) [0-9a-f]+:[0-9a-f]+:(?P<inode>[0-9]+) ",
    re.ASCII,
)


def holders_of(fd: int) -> list[int]:
    """Return the processes that hold a flock on the open file, as far as the kernel tells."""
    try:
        inode = os.fstat(fd).st_ino
        locks = Path("/proc/locks").read_text(errors="replace")
    except OSError:
        return []
    matches = _FLOCK.finditer(locks)
    pids = {int(match["pid"]) for match in matches if int(match["inode"]) == inode}
    # A process may have ended, and a child has its lock.
    return sorted(pid for pid in pids if Path(f"/proc/{pid}").exists())


_POLL_S = 0.02
_LONGEST_POLL_S = 0.5
_NAMED = 3


@dataclass(eq=False)
class StoreLock:
    """A lock file; made when it is first taken.

    ``wait_s`` overrides every writer's timeout; None keeps each call's default, 0 never waits.
    """

    _path: Path
    _wait_s: float | None = None

    def make(self) -> None:
        """Make the lock file, so that taking the lock later needs no space on the disk.

        Raises: StorageError.
        """
        close_quietly(self._open())

    def shared(self, wait_s: float = 10) -> AbstractContextManager[None]:
        """Share the lock.

        Raises: BusyError if another process holds it alone for ``wait_s`` seconds; StorageError.
        """
        return self._lock(fcntl.LOCK_SH, wait_s)

    def exclusive(self, wait_s: float = 1) -> AbstractContextManager[None]:
        """Hold the lock alone.

        Raises: BusyError if another process holds it for ``wait_s`` seconds; StorageError.
        """
        return self._lock(fcntl.LOCK_EX, wait_s)

    def reading(self, wait_s: float = 2) -> AbstractContextManager[bool]:
        """Share the lock if that needs no write; yield whether it was taken.

        It is not taken if the lock file is missing (blobstore has never written here), can't be
        opened, or another process holds it alone for ``wait_s`` seconds.
        """
        return lock_path(self._path, os.O_NONBLOCK, fcntl.LOCK_SH, wait_s)

    @contextmanager
    def _lock(self, kind: int, wait_s: float) -> Iterator[None]:
        if self._wait_s is not None and wait_s > 0:
            wait_s = self._wait_s
        fd = self._open()
        try:
            with os_errors("lock", self._path):
                is_held = take_lock(fd, kind, wait_s)
            if not is_held:
                named = ", ".join(f"process {pid}" for pid in holders_of(fd)[:_NAMED])
                message = f"the store is in use by {named or 'another process'} ({self._path})"
                hint = "Try again later, or wait for it: `wait_s=SECONDS`."
                raise BusyError(message, path=str(self._path), hint=hint)
            yield
        finally:
            close_quietly(fd)

    def _open(self) -> int:
        with os_errors("write to the store", self._path.parent):
            make_folder(self._path.parent)
            _refuse_links(self._path.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            return os.open(self._path, flags, FILE_MODE)


def _refuse_links(folder: Path) -> None:
    """Raise StorageError if our own folder, one in it, or one of packed models leads elsewhere."""
    for path in (folder, *sorted(folder.iterdir()), *sorted(folder.glob("packed/*"))):
        refuse_links(path.parent, [path.name])


def refuse_links(folder: Path, parts: Iterable[str]) -> None:
    """Raise StorageError if a path below ``folder``, along ``parts``, is a symbolic link.

    Raises: StorageError too if that is unknown.
    """
    place = str(folder)  # three times as fast as paths, and a list has thousands
    for part in parts:
        place = f"{place}/{part}"
        with os_errors("access", place):
            if stat.S_ISLNK(mode_of(place)):
                message = f"{place} is a symbolic link; links are not followed here"
                raise StorageError(message, path=place)


def mode_of(path: Path | str) -> int:
    """Return a file's own mode, or 0 if it does not exist. Raises: OSError if that is unknown."""
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


@contextmanager
def lock_path(path: Path, flags: int, kind: int, wait_s: float = 0) -> Iterator[bool]:
    """Open a file or folder and hold its lock; yield False if either fails within ``wait_s``."""
    try:
        fd = os.open(path, flags | os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        is_held = False
        with suppress(OSError):  # a file system without locks
            is_held = take_lock(fd, kind, wait_s)
        yield is_held
    finally:
        close_quietly(fd)


def take_lock(fd: int, kind: int, wait_s: float) -> bool:
    """Lock an open file; return False if that fails for ``wait_s`` seconds. Raises: OSError.

    A time in which this process was stopped, or its machine slept, counts as one try: the holder
    was stopped, too.
    """
    left = wait_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if left <= 0:
                return False
            before = time.monotonic()
            time.sleep(_POLL_S)
            left -= min(time.monotonic() - before, _LONGEST_POLL_S)
        else:
            return True


KEPT_S: Final = 7 * 24 * 3600
"""How long a clean-up spares a kept blob, in seconds."""
_LEFT_S: Final = 24 * 3600
_UNOWNED = "new-"
# The file that is locked where a folder's lock stays on its machine.
_OWNER = "owner"
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


def make_owned_folder(parent: Path) -> tuple[Path, int]:
    """Return a new folder in ``parent``, and an open descriptor of it, or in it, with its lock.

    Raises: OSError.
    """
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


class KeptBlobs:
    """The blobs that no manifest names yet, in our folder ``private``.

    Safe to share between processes and machines.
    """

    def __init__(self, private: Path) -> None:
        self.path = private / "kept"
        self.left = private / "left"
        self.sessions = private / "tmp"

    @contextmanager
    def owned_folder(self) -> Iterator[Path]:
        """Make a folder of this process, and remove it with its contents at the end.

        Raises: StorageError.
        """
        self.clean()
        with os_errors("write to the store", self.sessions):
            folder, fd = make_owned_folder(self.sessions)
        try:
            yield folder
        finally:
            close_quietly(fd)  # NFS and FUSE keep an open file under another name
            with suppress(OSError):  # the next session removes it
                remove_tree(folder)

    def clean(self) -> None:
        """Take over what killed sessions finished, and remove the rest; failures are ignored.

        So is what was taken over a day ago.
        """
        for folder in self._folders():
            is_left = False
            with _lock_folder(folder) as is_mine, suppress(OSError):
                is_left = is_mine and not (
                    folder.name.startswith(_UNOWNED) and is_young(folder, _LEFT_S)
                )
                if is_left:
                    self._take_over(folder)
                    remove_tree(folder)
            if is_left:  # no process owns it again: its name is random
                with suppress(OSError):  # NFS and FUSE let it go when the lock's file is closed
                    folder.rmdir()
        with suppress(OSError):
            for entry in list_folder(self.left):
                if not is_young(Path(entry.path), _LEFT_S):
                    Path(entry.path).unlink()

    def _take_over(self, folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            digest = Digest.from_file_name(path.name)
            if digest is not None and stat.S_ISREG(path.lstat().st_mode):
                make_folder(self.left, durable=False)
                if not is_young(path, _LEFT_S / 2):  # else its stamp is the one in the journal
                    renew(str(path))
                path.rename(self.left / digest.file_name)

    def take(self, digest: Digest, folder: Path) -> Path | None:
        """Move the blob of a killed session into ``folder``, which is the caller's.

        Return its path, or None. Raises: StorageError.
        """
        left, path = self.left / digest.file_name, folder / digest.file_name
        if os.path.lexists(left):
            with suppress(FileNotFoundError), os_errors("take over", path):
                return left.rename(path)
        return None

    def add(self, blobs: Iterable[FinishedBlob]) -> None:
        """Move finished blobs here, whose bytes are durable, and make their names durable.

        Raises: StorageError.
        """
        with os_errors("write to the store", self.path):
            make_folder(self.path)
            for blob in blobs:
                blob.path.rename(self.path / blob.digest.file_name)
            sync_folder(self.path)

    def digests(self) -> Iterator[str]:
        for folder in (self.path, self.left):
            with os_errors("list", folder):
                names = [entry.name for entry in list_folder(folder)]
            yield from (name.removeprefix("sha256-") for name in names)

    def stale(self, grace_s: float) -> Iterator[Leftover]:
        """Yield what a clean-up may remove.

        What killed sessions left is spared for ``grace_s`` seconds; kept blobs for a week,
        unless that is 0. Raises: StorageError.
        """
        for folder in self._folders():
            if _OURS.fullmatch(folder.name):
                with _lock_folder(folder) as is_mine, suppress(OSError):
                    if is_mine and not is_young(folder, grace_s):
                        nbytes = sum(path.lstat().st_size for path in folder.iterdir())
                        yield Leftover(folder, nbytes, "left by a killed import")
        yield from _older(self.left, grace_s, "left by a killed import")
        kept_s = KEPT_S if grace_s else 0
        yield from _older(self.path, kept_s, "made for a model that was never published")

    def _folders(self) -> Iterator[Path]:
        with suppress(OSError):
            yield from sorted(path for path in self.sessions.iterdir() if not path.is_symlink())


def _lock_folder(folder: Path) -> AbstractContextManager[bool]:
    """Hold a folder's lock; yield False if it has an owner."""
    owner = folder / _OWNER
    if os.path.lexists(owner):
        return lock_path(owner, os.O_RDWR | os.O_NONBLOCK, fcntl.LOCK_EX)
    return lock_path(folder, os.O_DIRECTORY, fcntl.LOCK_EX)


def is_young(path: Path, age_s: float) -> bool:
    """Return True if a file or folder changed in the last ``age_s`` seconds. Raises: OSError."""
    return path.lstat().st_mtime > time.time() - age_s


def _older(folder: Path, age_s: float, reason: str) -> Iterator[Leftover]:
    with os_errors("list", folder):
        paths = [Path(entry.path) for entry in list_folder(folder)]
        for path in paths:
            with suppress(FileNotFoundError):  # it has just been published
                if not is_young(path, age_s):
                    yield Leftover(path, path.lstat().st_size, reason)
