"""Stopping at system calls: a supervisor decides about each call before it happens.

The kernel's own way (seccomp_unotify(2), Linux 5.8): no debugger, no signal, and the calls of all
threads are seen. The numbers are those of x86-64 (arch/x86/entry/syscalls/syscall_64.tbl).
"""

import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

CAN_STOP = platform.system() == "Linux" and platform.machine() == "x86_64"
_READING = {"read": 0, "pread64": 17, "preadv": 295, "preadv2": 327, "getdents64": 217}
_SYNCING = {"fsync": 74, "fdatasync": 75, "syncfs": 306}
_WRITING = {"write": 1, "pwrite64": 18, "pwritev": 296, "ftruncate": 77, "fallocate": 285}
_OTHERS = {"fchmod": 91, "flock": 73}
# By the arguments that name files: "f" an open file, "d" a folder with the path behind it, "p" a
# path, "o" flags of open, "-" anything else.
_TABLE = {
    "f": _READING | _SYNCING | _WRITING | _OTHERS,
    "ff": {"sendfile": 40},
    "f-f": {"copy_file_range": 326},
    "p": {"mkdir": 83, "rmdir": 84, "unlink": 87, "chmod": 90, "truncate": 76},
    "po": {"open": 2},
    "pp": {"rename": 82, "link": 86},
    "-p": {"symlink": 88},
    "dp": {"mkdirat": 258, "unlinkat": 263, "fchmodat": 268, "utimensat": 280},
    "dpo": {"openat": 257},
    "dpdp": {"renameat": 264, "renameat2": 316, "linkat": 265},
    "-dp": {"symlinkat": 266},
}
_CALLS = {
    number: (name, letters) for letters, row in _TABLE.items() for name, number in row.items()
}
_HERE = -100 & 0xFFFFFFFF
_LONGEST_PATH = 4096
OUTPUT = "(output)"
"""The path of what a command prints to."""

_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER = 317, 1, 1 << 3
_NO_NEW_PRIVILEGES = 38
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_NOTICE = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ASK, _ALLOW = 0x7FC00000, 0x7FFF0000


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its name, its paths (open files included), and whether it only reads."""

    name: str
    paths: tuple[str, ...]
    reads: bool = False

    @property
    def syncs(self) -> bool:
        """True for fsync, fdatasync and syncfs."""
        return self.name in _SYNCING

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.paths)})"


@dataclass(frozen=True, slots=True)
class Signal:
    """Before the call the process gets a signal."""

    number: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The call does nothing and fails with this error number; 0: it says that it succeeded."""

    code: int

    def __str__(self) -> str:
        return errno.errorcode.get(self.code, "nothing done")


KILL = Signal(signal.SIGKILL)
PRETEND = Fail(0)
Action = Signal | Fail
Decide = Callable[[Call], Action | None]
"""Returns what happens to a call; None: it goes on."""


def stop_at_calls() -> int:
    """Make this process and its children wait at the table's calls. Raises: OSError."""
    program = [
        _INSTRUCTION.pack(_LOAD, 0, 0, 0),
        *(
            _INSTRUCTION.pack(_JUMP_IF_EQUAL, len(_CALLS) - index, 0, number)
            for index, number in enumerate(_CALLS)
        ),
        _INSTRUCTION.pack(_RETURN, 0, 0, _ALLOW),
        _INSTRUCTION.pack(_RETURN, 0, 0, _ASK),
    ]
    code = ctypes.create_string_buffer(b"".join(program))
    filter_program = struct.pack("@HP", len(program), ctypes.addressof(code))
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    fd = library.syscall(
        _SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.create_string_buffer(filter_program)
    )
    if fd < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(fd)


class Listener:
    """The end of `stop_at_calls` that decides, for the process ``pid``."""

    def __init__(self, fd: int, pid: int) -> None:
        self._fd, self._pid = fd, pid
        self._memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def serve(self, answer: Decide, timeout_s: float) -> None:
        """Answer until all have ended. Raises: TimeoutError when no call comes for so long."""
        while events := self._poll.poll(timeout_s * 1000):
            if not events[0][1] & select.POLLIN:
                return
            notice = bytearray(_NOTICE.size)
            try:
                fcntl.ioctl(self._fd, _RECEIVE, notice)
            except FileNotFoundError:  # its caller was killed meanwhile
                continue
            key, _, _, number, _, _, *arguments = _NOTICE.unpack(notice)
            self._act(key, answer(self._call(number, arguments)))
        raise TimeoutError

    def _act(self, key: int, action: Action | None) -> None:
        if isinstance(action, Signal):
            os.kill(self._pid, action.number)
        if action == KILL:
            return  # answered, the call might still happen
        code, flags = (-action.code, 0) if isinstance(action, Fail) else (0, _CONTINUE)
        with suppress(FileNotFoundError):  # its caller was killed meanwhile
            fcntl.ioctl(self._fd, _SEND, _ANSWER.pack(key, 0, code, flags))

    def _call(self, number: int, arguments: list[int]) -> Call:
        """Return the call; without paths if its caller was killed or it names no open file."""
        name, letters = _CALLS[number]
        paths: list[str] = []
        folder, creates = "", not name.startswith("open")
        try:
            for letter, argument in zip(letters, arguments, strict=False):
                if letter == "f":
                    paths.append(OUTPUT if argument in (1, 2) else self._open_path(argument))
                elif letter == "d":
                    here = argument & 0xFFFFFFFF
                    folder = "" if here == _HERE else self._open_path(here)
                elif letter == "p":
                    raw = os.pread(self._memory, _LONGEST_PATH, argument).split(b"\0", 1)[0]
                    # An empty path is the open file itself.
                    paths.append(os.path.join(folder, os.fsdecode(raw)).removesuffix("/"))  # noqa: PTH118
                elif letter == "o":
                    creates = bool(argument & (os.O_CREAT | os.O_TRUNC))
        except OSError:
            return Call(name, ())
        return Call(name, tuple(paths), reads=name in _READING or not creates)

    def _open_path(self, fd: int) -> str:
        return os.readlink(f"/proc/{self._pid}/fd/{fd}")  # noqa: PTH115  # twice as fast

    def close(self) -> None:
        """Decide no more: calls that wait, and all later ones, fail with ENOSYS."""
        os.close(self._memory)
        os.close(self._fd)
