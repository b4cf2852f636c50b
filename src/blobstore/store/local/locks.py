"""The store's locks, which the kernel frees when their holder dies, so there is nothing stale to clean up (``flock``).

``.blobstore/lock``: many writers share it, a clean-up holds it alone, and opening a model shares it
where it can. ``.blobstore/names``: held alone for the moment in which a manifest is checked and
then linked or removed; whoever takes it shares the other one. Ollama takes neither.

Holders: which processes hold a file's flock, as the kernel says at the moment of asking.

Nothing is written down by holders, so nothing can be stale. Linux lists every flock in /proc/locks,
and again in the fdinfo of the descriptor that has it; elsewhere, and a holder on another machine is
not found. Source: proc_locks(5), proc_pid_fdinfo(5) ("lock:").
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
_START_FIELD = 19  # proc_pid_stat(5): starttime is field 22, and these are counted from the third, behind the name


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a lock: its number, its command line ("" when that can't be read), for how long it has run."""

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

    None where the kernel does not say.
    """
    try:
        inode = os.fstat(fd).st_ino
    except OSError:
        return []
    pids = {pid for pid, found in _locks(_PROC / "locks") if found == inode}
    return [_described(pid) for pid in sorted(pids) if _holds(pid, inode)]


def _locks(path: Path) -> list[tuple[int, int]]:
    """Return process and inode of each flock that a file of /proc lists."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return [(int(match["pid"]), int(match["inode"])) for match in _FLOCK.finditer(text)]


def _holds(pid: int, inode: int) -> bool:
    """Return True when a descriptor of the process has the lock now, or when that can't be read.

    A lock outlives the process that took it in a child that was forked meanwhile, and then its
    number may be another's.
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
    # The interpreter's and the program's folders say nothing.
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
_NAMED = 3


class StoreLock:
    """A lock file; made when it is first taken.

    ``wait_s`` overrides every writer's timeout; None keeps each call's default, 0 never waits.
    """

    def __init__(self, path: Path, wait_s: float | None = None) -> None:
        self._path = path
        self._wait_s = wait_s

    def make(self) -> None:
        """Make the lock file: taking the lock needs no space on the disk then.

        Raises: StorageError.
        """
        close_quietly(self._open())

    @contextmanager
    def shared(self, wait_s: float = 10) -> Iterator[None]:
        """Hold the lock beside other sharers.

        Raises: BusyError when it is held alone for ``wait_s``; StorageError.
        """
        with self._held(fcntl.LOCK_SH, wait_s):
            yield

    @contextmanager
    def exclusive(self, wait_s: float = 1) -> Iterator[None]:
        """Hold the lock alone.

        Raises: BusyError when anybody else holds it for ``wait_s`` seconds; StorageError.
        """
        with self._held(fcntl.LOCK_EX, wait_s):
            yield

    @contextmanager
    def reading(self, wait_s: float = 2) -> Iterator[bool]:
        """Hold the lock beside other sharers where that needs no writing; yield whether it is held.

        It is not when the lock file is missing (blobstore has never written here), can't be opened,
        or is held alone by another process for ``wait_s``.
        """
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            yield False
            return
        try:
            try:
                is_held = _take(fd, fcntl.LOCK_SH, wait_s)
            except OSError:  # a file system without locks
                is_held = False
            yield is_held
        finally:
            close_quietly(fd)

    @contextmanager
    def _held(self, kind: int, wait_s: float) -> Iterator[None]:
        if self._wait_s is not None and wait_s > 0:
            wait_s = self._wait_s
        fd = self._open()
        try:
            with os_errors("lock", self._path):
                is_held = _take(fd, kind, wait_s)
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
        return BusyError(
            message, path=str(self._path), hint="Try again later, or wait for it: wait_s=SECONDS."
        )


def _refuse_links(folder: Path) -> None:
    """Raise StorageError when our own folder, or one in it, is a link: what is written there would be in others' hands."""
    with os.scandir(folder) as entries:
        links = [Path(entry.path) for entry in entries if entry.is_symlink()]
    for link in [folder] if folder.is_symlink() else sorted(links):
        raise StorageError(
            f"{link} is a symbolic link, and nothing is written through one", path=str(link)
        )


def _take(fd: int, kind: int, wait_s: float) -> bool:
    """Return True when the lock was to be had within ``wait_s`` seconds. Raises: OSError."""
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)
        else:
            return True
