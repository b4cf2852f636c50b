"""The system calls that read, change and stat a disk: numbers, paths and meaning.

Sources: Linux, arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (the
table of arm64).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
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
