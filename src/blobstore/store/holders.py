"""Holders: which processes hold a file's flock, as the kernel says at the moment of asking.

Nothing is written down by holders, so nothing can be stale. Linux lists every flock in /proc/locks, and again in the
fdinfo of the descriptor that has it; elsewhere, and a holder on another machine is not found.
Source: proc_locks(5), proc_pid_fdinfo(5) ("lock:").
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_FLOCK = re.compile(r"[0-9]+: FLOCK +[A-Z]+ +(READ|WRITE) +(?P<pid>[0-9]+) [0-9a-f]+:[0-9a-f]+:(?P<inode>[0-9]+) ", re.ASCII)
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
    """Return the processes that hold a flock on the file that is open as ``fd``; none where the kernel does not say."""
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

    A lock outlives the process that took it in a child that was forked meanwhile, and then its number may be another's.
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
