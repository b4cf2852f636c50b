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
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from blobstore.errors import BusyError, StorageError
from blobstore.io.durable import FILE_MODE, make_folder, os_errors
from blobstore.io.ranges import close_quietly

_FLOCK = re.compile(
    r"[0-9]+: FLOCK +[A-Z]+ +(READ|WRITE) +(?P<pid>[0-9]+) [0-9a-f]+:[0-9a-f]+:(?P<inode>[0-9]+) ",
    re.ASCII,
)
_LONGEST_COMMAND = 120


def holders_of(fd: int) -> list[str]:
    """Return the processes that hold a flock on the file that is open as ``fd``, for messages.

    The list is empty where the kernel does not tell.
    """
    try:
        inode = os.fstat(fd).st_ino
        locks = Path("/proc/locks").read_text(errors="replace")
    except OSError:
        return []
    matches = _FLOCK.finditer(locks)
    pids = {int(match["pid"]) for match in matches if int(match["inode"]) == inode}
    return [text for pid in sorted(pids) if (text := _described(pid)) is not None]


def _described(pid: int) -> str | None:
    """Return a text that names a process; None if it has ended, but a child has its lock."""
    if pid == os.getpid():
        return "this process itself"
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except FileNotFoundError:
        return None
    except OSError:
        return f"process {pid}"
    # The folders of the interpreter and the program are left out.
    command = " ".join(" ".join([*(Path(word).name for word in words[:2]), *words[2:]]).split())
    if len(command) > _LONGEST_COMMAND:
        command = f"{command[:_LONGEST_COMMAND]}…"
    return f"process {pid} ({command})" if command else f"process {pid}"


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
        found = holders_of(fd)
        named = ", ".join(found[:_NAMED]) or "another process"
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        message = f"the store is in use by {named}{more} ({self._path})"
        hint = "Try again later, or wait for it: `wait_s=SECONDS`."
        return BusyError(message, path=str(self._path), hint=hint)


def _refuse_links(folder: Path) -> None:
    """Raise StorageError if our own folder, one in it, or one of packed models leads elsewhere."""
    links = [folder, *sorted(folder.iterdir()), *sorted(folder.glob("packed/*"))]
    refuse_link(next((path for path in links if path.is_symlink()), None))


def refuse_link(link: Path | None) -> None:
    """Raise StorageError for a symbolic link on the way to a file that is to be written."""
    if link is not None:
        message = f"{link} is a symbolic link, and nothing is written through one"
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
