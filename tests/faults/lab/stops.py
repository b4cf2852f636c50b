"""Stopping at system calls: a supervisor is asked about each call before it happens.

The kernel's own way (seccomp_unotify(2), Linux 5.8): no debugger, no signal, and a call of any
thread is seen. Here are the numbers of the calls (Linux, arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h), and the listener that answers them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import select
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_MACHINES = ("x86_64", "aarch64")
# name: number on x86-64, on arm64 (-1: there is none), and its arguments that are paths: "f" an
# open file, "d" a folder with the path behind it, "p" a path, "b" a buffer, "n" how long it is, "o"
# flags of open, "-" anything else.
_TABLE = {
    "read": (0, 63, "fbn"),
    "pread64": (17, 67, "fbn-"),
    "preadv": (295, 69, "f---"),
    "preadv2": (327, 286, "f---"),
    "getdents64": (217, 61, "f--"),
    "write": (1, 64, "fbn"),
    "pwrite64": (18, 68, "fbn-"),
    "pwritev": (296, 70, "f---"),
    "copy_file_range": (326, 285, "f-f---"),
    "sendfile": (40, 71, "ff--"),
    "open": (2, -1, "po-"),
    "openat": (257, 56, "dpo-"),
    "mkdir": (83, -1, "p-"),
    "mkdirat": (258, 34, "dp-"),
    "rename": (82, -1, "pp"),
    "renameat": (264, 38, "dpdp"),
    "renameat2": (316, 276, "dpdp-"),
    "link": (86, -1, "pp"),
    "linkat": (265, 37, "dpdp-"),
    "symlink": (88, -1, "-p"),
    "symlinkat": (266, 36, "-dp"),
    "unlink": (87, -1, "p"),
    "unlinkat": (263, 35, "dp-"),
    "rmdir": (84, -1, "p"),
    "truncate": (76, 45, "p-"),
    "ftruncate": (77, 46, "f-"),
    "fallocate": (285, 47, "f---"),
    "chmod": (90, -1, "p-"),
    "fchmod": (91, 52, "f-"),
    "fchmodat": (268, 53, "dp-"),
    "utimensat": (280, 88, "dp--"),
    "fsync": (74, 82, "f"),
    "fdatasync": (75, 83, "f"),
    "syncfs": (306, 267, "f"),
    "flock": (73, 32, "f-"),
}
# Calls that only look: there are so many that they are stopped at only where that is asked for.
_LOOKS = {
    "stat": (4, -1, "p-"),
    "lstat": (6, -1, "p-"),
    "fstat": (5, 80, "f-"),
    "newfstatat": (262, 79, "dp--"),
    "statx": (332, 291, "dp---"),
    "access": (21, -1, "p-"),
    "faccessat": (269, 48, "dp-"),
    "faccessat2": (439, 439, "dp--"),
    "readlink": (89, -1, "p--"),
    "readlinkat": (267, 78, "dp--"),
    "statfs": (137, 43, "p-"),
    "fstatfs": (138, 44, "f-"),
    "lseek": (8, 62, "f--"),
    "mmap": (9, 222, "----f-"),
    "fadvise64": (221, 223, "f---"),
    "flistxattr": (196, 13, "f--"),
    "fgetxattr": (193, 10, "f---"),
    "close": (3, 57, "f"),
}
READING = frozenset({"read", "pread64", "preadv", "preadv2", "getdents64", *_LOOKS})
SYNCING = frozenset({"fsync", "fdatasync", "syncfs"})
HERE = _MACHINES.index(platform.machine()) if platform.machine() in _MACHINES else None


def _numbers(table: Mapping[str, tuple[int, int, str]]) -> dict[int, str]:
    if HERE is None:
        return {}
    numbers = {name: row[:2][HERE] for name, row in table.items()}
    return {number: name for name, number in numbers.items() if number >= 0}


NUMBERS = _numbers(_TABLE)
"""Name of each watched call by its number on this machine.

Nothing where the numbers are not known.
"""
ALL_NUMBERS = _numbers(_TABLE | _LOOKS)
"""The same, with the calls that only look."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its name, its paths (open files included), and whether it only reads."""

    name: str
    paths: tuple[str, ...]
    reads: bool = False

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.paths)})"


def shape(name: str) -> str:
    """Return what the arguments of a call are, one letter each."""
    return (_TABLE | _LOOKS)[name][2]


def is_creating(flags: int) -> bool:
    """Return True for the flags of an open that may make or cut a file."""
    return bool(flags & (os.O_CREAT | os.O_TRUNC))


_SECCOMP_CALL = (317, 277)
_SET_MODE_FILTER = 1
_NEW_LISTENER = 1 << 3
_NO_NEW_PRIVILEGES = 38
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_NOTICE = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ASK, _ALLOW = 0x7FC00000, 0x7FFF0000


@dataclass(frozen=True, slots=True)
class Stop:
    """A waiting call: the ``key`` for its answer, its thread, number and arguments."""

    key: int
    thread: int
    number: int
    arguments: tuple[int, ...]


def stop_at(numbers: Iterable[int]) -> int:
    """Make this process, and all that it starts, wait at the calls of these numbers.

    Return whom to ask with `Listener`.

    Raises: OSError where the kernel can't.
    """
    wanted = sorted(numbers)
    program = [
        _INSTRUCTION.pack(_LOAD, 0, 0, 0),
        *(
            _INSTRUCTION.pack(_JUMP_IF_EQUAL, len(wanted) - index, 0, number)
            for index, number in enumerate(wanted)
        ),
        _INSTRUCTION.pack(_RETURN, 0, 0, _ALLOW),
        _INSTRUCTION.pack(_RETURN, 0, 0, _ASK),
    ]
    code = ctypes.create_string_buffer(b"".join(program))
    filter_program = ctypes.create_string_buffer(
        struct.pack("@HP", len(program), ctypes.addressof(code))
    )
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    fd = library.syscall(_SECCOMP_CALL[HERE or 0], _SET_MODE_FILTER, _NEW_LISTENER, filter_program)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(fd)


class Listener:
    """The end of `stop_at` that decides."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def next(self, timeout_s: float) -> Stop | None:
        """Return the next waiting call, or None when the process and its children have ended.

        Raises: TimeoutError when there is neither for so long.
        """
        while events := self._poll.poll(timeout_s * 1000):
            for _, event in events:
                if not event & select.POLLIN:
                    return None
                buffer = bytearray(_NOTICE.size)
                try:
                    fcntl.ioctl(self._fd, _RECEIVE, buffer)
                except FileNotFoundError:  # its caller was killed meanwhile
                    continue
                key, thread, _, number, _, _, *arguments = _NOTICE.unpack(buffer)
                return Stop(key, thread, number, tuple(arguments))
        raise TimeoutError

    def go_on(self, stop: Stop) -> None:
        """Let the call happen."""
        self._send(_ANSWER.pack(stop.key, 0, 0, _CONTINUE))

    def answer(self, stop: Stop, result: int) -> None:
        """Give the caller ``result`` (negative: an error number) instead of making the call."""
        self._send(_ANSWER.pack(stop.key, max(result, 0), min(result, 0), 0))

    def _send(self, answer: bytes) -> None:
        try:
            fcntl.ioctl(self._fd, _SEND, answer)
        except FileNotFoundError:  # its caller was killed meanwhile
            return

    def close(self) -> None:
        """Nobody decides any more: calls that wait, and all later ones, fail with ENOSYS."""
        os.close(self._fd)
