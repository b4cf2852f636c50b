"""Half of another process's read or write, done for it, as the kernel may do at any time."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct

_TAKE_FD = 438  # pidfd_getfd(2), of the same number everywhere
_VECTOR = struct.Struct("@NN")


def do_half(pid: int, memory: int, name: str, arguments: tuple[int, ...]) -> int | None:
    """Do half of a call's bytes, rounded down, and return how many; None if that is impossible.

    ``memory``: the process's memory, open for reading and writing. Writes around the page cache are
    halved by 4 KiB. Raises: OSError as the call would.
    """
    fd, address, length, offset = (*arguments, 0, 0, 0, 0)[:4]
    if name in ("preadv", "preadv2"):
        if length != 1:
            return None
        address, length = _VECTOR.unpack(os.pread(memory, _VECTOR.size, address))
    elif name not in ("read", "pread64", "write", "pwrite64"):
        return None
    taken = _take(pid, fd)
    try:
        is_direct = bool(fcntl.fcntl(taken, fcntl.F_GETFL) & os.O_DIRECT)
        half = length // 2 // mmap.PAGESIZE * mmap.PAGESIZE if is_direct else length // 2
        if half == 0:
            return None
        if name == "write":
            return os.write(taken, os.pread(memory, half, address))
        if name == "pwrite64":
            with mmap.mmap(-1, half) as aligned:
                aligned[:] = os.pread(memory, half, address)
                return os.pwrite(taken, aligned, offset)
        data = os.read(taken, half) if name == "read" else os.pread(taken, half, offset)
        return os.pwrite(memory, data, address) if data else 0
    finally:
        os.close(taken)


def _take(pid: int, fd: int) -> int:
    """Return a descriptor of ours of a file that another process has open. Raises: OSError."""
    process = os.pidfd_open(pid)
    try:
        taken: int = ctypes.CDLL(None, use_errno=True).syscall(_TAKE_FD, process, fd, 0)
        if taken < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        return taken
    finally:
        os.close(process)
