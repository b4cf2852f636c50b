"""The store's locks (``flock``), and the processes that hold them.

The kernel releases a lock when its holder dies, so a lock is never stale. ``.blobstore/lock``: many
writers share it, a clean-up holds it alone, and opening a model shares it if it can.
``.blobstore/names``: held alone for the moment in which a manifest is checked and then linked or
removed, by processes that share the other lock. Ollama takes neither.

Holders are asked of the kernel. Linux lists every flock in /proc/locks (proc_locks(5)). Other
systems do not, and holders on other machines are not found.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from blobstore.errors import BusyError, StorageError
from blobstore.io.durable import FILE_MODE, make_folder, os_errors
from blobstore.io.ranges import close_quietly

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


class StoreLock:
    """A lock file; made when it is first taken.

    ``wait_s`` overrides every writer's timeout; None keeps each call's default, 0 never waits.
    """

    def __init__(self, path: Path, wait_s: float | None = None) -> None:
        self._path = path
        self._wait_s = wait_s

    def make(self) -> None:
        """Make the lock file, so that taking the lock later needs no space on the disk.

        Raises: StorageError.
        """
        close_quietly(self._open())

    def shared(self, wait_s: float = 10) -> AbstractContextManager[None]:
        """Hold the lock beside other sharers.

        Raises: BusyError if another process holds it alone for ``wait_s`` seconds; StorageError.
        """
        return self._held(fcntl.LOCK_SH, wait_s)

    def exclusive(self, wait_s: float = 1) -> AbstractContextManager[None]:
        """Hold the lock alone.

        Raises: BusyError if another process holds it for ``wait_s`` seconds; StorageError.
        """
        return self._held(fcntl.LOCK_EX, wait_s)

    def reading(self, wait_s: float = 2) -> AbstractContextManager[bool]:
        """Hold the lock beside other sharers if that needs no write; yield whether it is held.

        It is not held if the lock file is missing (blobstore has never written here), can't be
        opened, or another process holds it alone for ``wait_s`` seconds.
        """
        return locked(self._path, os.O_NONBLOCK, fcntl.LOCK_SH, wait_s)

    @contextmanager
    def _held(self, kind: int, wait_s: float) -> Iterator[None]:
        if self._wait_s is not None and wait_s > 0:
            wait_s = self._wait_s
        fd = self._open()
        try:
            with os_errors("lock", self._path):
                is_held = take_lock(fd, kind, wait_s)
            if not is_held:
                raise self._busy(fd)
            yield
        finally:
            close_quietly(fd)

    def _open(self) -> int:
        with os_errors("write to the store", self._path.parent):
            make_folder(self._path.parent)
            _refuse_links(self._path.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            return os.open(self._path, flags, FILE_MODE)

    def _busy(self, fd: int) -> BusyError:
        named = ", ".join(f"process {pid}" for pid in holders_of(fd)[:_NAMED])
        message = f"the store is in use by {named or 'another process'} ({self._path})"
        hint = "Try again later, or wait for it: `wait_s=SECONDS`."
        return BusyError(message, path=str(self._path), hint=hint)


def _refuse_links(folder: Path) -> None:
    """Raise StorageError if our own folder, one in it, or one of packed models leads elsewhere."""
    links = [folder, *sorted(folder.iterdir()), *sorted(folder.glob("packed/*"))]
    refuse_link(next((path for path in links if path.is_symlink()), None))


def first_link(folder: Path, parts: Iterable[str]) -> Path | None:
    """Return the first path below ``folder``, along ``parts``, that is a symbolic link, or None.

    Raises: StorageError if that is unknown.
    """
    place = str(folder)  # three times as fast as paths, and a list has thousands
    for part in parts:
        place = f"{place}/{part}"
        with os_errors("access", place):
            if stat.S_ISLNK(mode_of(place)):
                return Path(place)
    return None


def mode_of(path: Path | str) -> int:
    """Return a file's own mode, or 0 if it does not exist. Raises: OSError if that is unknown."""
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def refuse_link(link: Path | None) -> None:
    """Raise StorageError for a symbolic link on the way to a file that is to be written."""
    if link is not None:
        message = f"{link} is a symbolic link, and none is followed here"
        raise StorageError(message, path=str(link))


@contextmanager
def locked(path: Path, flags: int, kind: int, wait_s: float = 0) -> Iterator[bool]:
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
