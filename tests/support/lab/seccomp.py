"""Stopping at system calls: a supervisor is told of each call before it happens.

The kernel's own way (seccomp_unotify(2), Linux 5.5): no debugger, no signal, and a call of any
thread is seen. The one who decides may let the call go on, answer it with a result or an error, or
kill the caller.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass

_SECCOMP_CALL = {"x86_64": 317, "aarch64": 277}
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
    fd = library.syscall(
        _SECCOMP_CALL[os.uname().machine], _SET_MODE_FILTER, _NEW_LISTENER, filter_program
    )
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


def is_possible() -> bool:
    """Return True on a system whose numbers are known."""
    return sys.platform == "linux" and os.uname().machine in _SECCOMP_CALL
