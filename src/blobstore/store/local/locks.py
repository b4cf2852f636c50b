"""The store's locks (``flock``), and the processes that hold them.

The kernel releases a lock when its holder dies, so a lock is never stale. ``.blobstore/lock``: many
writers share it, a clean-up holds it alone, and opening a model shares it if it can.
``.blobstore/names``: held alone for the moment in which a manifest is checked and then linked or
removed, by processes that share the other lock. Ollama takes neither.

Holders are asked of the kernel. Linux lists every flock in /proc/locks, and again in the fdinfo of
its descriptor. Other systems do not, and holders on other machines are not found. Source:
proc_locks(5), proc_pid_fdinfo(5) ("lock:").
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BusyError, StorageError
from blobstore.io.durable import FILE_MODE, make_folder, os_errors
from blobstore.io.ranges import close_quietly

_PROC = Path("/proc")
_FLOCK = re.compile(
    r"[0-9]+: FLOCK +[A-Z]+ +(READ|WRITE) +(?P<pid>[0-9]+) [0-9a-f]+:[0-9a-f]+:(?P<inode>[0-9]+) ",
    re.ASCII,
)
_LONGEST_COMMAND = 120
_START_FIELD = 19  # proc_pid_stat(5): starttime is field 22; fields are counted from the third here


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a lock: its number, command line ("" if unknown), and running time."""

    pid: int
    command: str
    running_s: float | None

    def __str__(self) -> str:
        if self.pid == os.getpid():
            return "this process itself"
        command = f" ({self.command})" if self.command else ""
        since = f", started {_duration(self.running_s)} ago" if self.running_s is not None else ""
        return f"process {self.pid}{command}{since}"


def holders_of(fd: int) -> list[Holder]:
    """Return the processes that hold a flock on the file that is open as ``fd``.

    The list is empty where the kernel does not tell.
    """
    try:
        inode = os.fstat(fd).st_ino
    except OSError:
        return []
    pids = {pid for pid, found in _locks(_PROC / "locks") if found == inode}
    return [_described(pid) for pid in sorted(pids) if _holds(pid, inode)]


def _locks(path: Path) -> list[tuple[int, int]]:
    """Return the process and the inode of each flock that a file of /proc lists."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return [(int(match["pid"]), int(match["inode"])) for match in _FLOCK.finditer(text)]


def _holds(pid: int, inode: int) -> bool:
    """Return True if a descriptor of the process has the lock now, or if that can't be read.

    A forked child keeps a lock when the process that took it has ended, and another process may
    have got the number of that one.
    """
    try:
        descriptors = list((_PROC / str(pid) / "fdinfo").iterdir())
    except PermissionError:
        return True
    except OSError:
        return False
    return any(found == inode for descriptor in descriptors for _, found in _locks(descriptor))


def _described(pid: int) -> Holder:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = []
    # The folders of the interpreter and the program are left out.
    command = " ".join(" ".join([*(Path(word).name for word in words[:2]), *words[2:]]).split())
    if len(command) > _LONGEST_COMMAND:
        command = f"{command[:_LONGEST_COMMAND]}…"
    return Holder(pid, command, _running(pid))


def _running(pid: int) -> float | None:
    try:
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        started = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, IndexError, ValueError):
        return None


def _duration(seconds: float) -> str:
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


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
        named = ", ".join(map(str, found[:_NAMED])) or "another process"
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
