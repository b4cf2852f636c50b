"""Our command in a child process, stopped at its system calls: go on, fail, half, or die.

The child is a fork, so Python's start is paid once: a run with a fault takes as long as the
command's work, some 30 ms. It runs the real command line, ``blobstore ARGUMENTS…``, with its own
output and exit code.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import io
import mmap
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from faults.lab.stops import (
    ALL_NUMBERS,
    HERE,
    NUMBERS,
    READING,
    Call,
    Listener,
    Stop,
    is_creating,
    shape,
    stop_at,
)
from support.mounts import NotShownError

_CRASHED = 70
_HERE = -100 & 0xFFFFFFFF
_LONGEST_PATH = 4096
_HUNG_S = 240
_POLL_S = 0.0005
OUTPUT = "(output)"
_TAKE_FD = 438  # pidfd_getfd(2), of the same number everywhere
_VECTOR = struct.Struct("@NN")


class Action:
    """What happens to a call."""


class Kill(Action):
    """The process ends by SIGKILL, before the call."""


class Interrupt(Action):
    """The process gets SIGINT before the call."""


@dataclass(frozen=True, slots=True)
class Fail(Action):
    """The call does nothing and fails with this error number."""

    code: int

    def __str__(self) -> str:
        return errno.errorcode[self.code]


class Pretend(Action):
    """The call does nothing and says that it succeeded."""


class Half(Action):
    """A read or write of several bytes does half of them, as it may."""


Decide = Callable[[Call], Action | None]


@dataclass(slots=True)
class At:
    """Do ``action`` at the call of that number (from 1) among the ``chosen``.

    ``on``: at all calls from there on.
    """

    number: int
    action: Action
    chosen: Callable[[Call], bool] = lambda call: not call.reads
    on: bool = False
    hit: Call | None = None
    seen: int = 0

    def __call__(self, call: Call) -> Action | None:
        """Return what happens to this call; None: it goes on."""
        if not self.chosen(call):
            return None
        self.seen += 1
        if self.seen == self.number or (self.on and self.seen > self.number):
            self.hit = self.hit or call
            return self.action
        return None


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a command: exit code (or negative signal), output, and calls under ``within``."""

    code: int
    out: str
    err: str
    calls: list[Call] = field(default_factory=list)
    hung: bool = False


def run(
    *arguments: object,
    within: Iterable[Path] = (),
    decide: Decide | None = None,
    before: Callable[[], None] = lambda: None,
    kill_after_s: float | None = None,
    looks: bool = False,
    program: Callable[[], None] | None = None,
) -> Done:
    """Run ``blobstore ARGUMENTS…`` in a fork of this process.

    With ``within``, its calls on paths below those folders, and its prints, are noted, and
    ``decide`` is asked about each. ``looks``: the calls that only look at files are among them.
    ``before`` is called in the child first. ``program`` is run instead of the command line.
    ``kill_after_s``: it is killed after so many seconds. One that takes four minutes is killed too,
    and hung.
    """
    if within and HERE is None:
        raise NotShownError("system calls can be stopped at on Linux only")
    outputs = [os.memfd_create(name) for name in ("out", "err")]
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _be_the_command(
            arguments,
            outputs,
            theirs if within else None,
            before,
            ALL_NUMBERS if looks else NUMBERS,
            program,
        )
    theirs.close()
    calls: list[Call] = []
    try:
        if within:
            hung = _watch(pid, ours, tuple(f"{path}" for path in within), decide, calls)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        else:
            code, hung = _wait(pid, kill_after_s)
        out, err = map(_text, outputs)
        return Done(code, out, err, calls, hung)
    finally:
        ours.close()
        for fd in outputs:
            os.close(fd)


def _wait(pid: int, kill_after_s: float | None) -> tuple[int, bool]:
    """Return the exit code, and whether the process hung."""
    until = time.monotonic() + (_HUNG_S if kill_after_s is None else kill_after_s)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), False
        if time.monotonic() >= until:
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), kill_after_s is None
        time.sleep(_POLL_S)


def _text(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode()


def _be_the_command(
    arguments: Iterable[object],
    outputs: list[int],
    asked: socket.socket | None,
    before: Callable[[], None],
    numbers: Iterable[int],
    program: Callable[[], None] | None,
) -> None:
    """Be the command; this never returns."""
    code = _CRASHED
    try:
        for fd, output in zip((1, 2), outputs, strict=True):
            os.dup2(output, fd)
        sys.stdout, sys.stderr = (io.TextIOWrapper(open(fd, "wb", closefd=False)) for fd in (1, 2))  # noqa: SIM115
        sys.argv = ["blobstore", *map(str, arguments)]
        from blobstore.cli.main import main

        # Those of the experiment would remove its files when the command ends.
        atexit._clear()
        before()
        if asked is not None:
            socket.send_fds(asked, [b"."], [stop_at(numbers)])
        (program or main)()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # a foreign error is what the experiment wants to see
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = 120  # as Python's own end does
        os._exit(code)


def _watch(
    pid: int,
    asked: socket.socket,
    within: tuple[str, ...],
    decide: Decide | None,
    calls: list[Call],
) -> bool:
    """Decide about every call of the command until it has ended; return whether it hung."""
    _, fds, _, _ = socket.recv_fds(asked, 1, 1)
    if not fds:
        raise NotShownError(
            "this kernel does not let a process be stopped at its system calls (seccomp_unotify)"
        )
    listener = Listener(fds[0])
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        while (stop := listener.next(_HUNG_S)) is not None:
            call = _call(pid, memory, stop, within)
            if call is not None:
                calls.append(call)
            action = decide(call) if call is not None and decide is not None else None
            _act(pid, memory, listener, stop, action)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        return True
    finally:
        os.close(memory)
        listener.close()
    return False


def _act(pid: int, memory: int, listener: Listener, stop: Stop, action: Action | None) -> None:
    match action:
        case Kill():
            os.kill(pid, signal.SIGKILL)
        case Interrupt():
            os.kill(pid, signal.SIGINT)
            listener.go_on(stop)
        case Fail(code):
            listener.answer(stop, -code)
        case Pretend():
            listener.answer(stop, 0)
        case Half():
            result = _do_half(pid, memory, ALL_NUMBERS[stop.number], stop.arguments)
            if result is None:
                listener.go_on(stop)
            else:
                listener.answer(stop, result)
        case _:
            listener.go_on(stop)


def _call(pid: int, memory: int, stop: Stop, within: tuple[str, ...]) -> Call | None:
    """Return the call, when it is one of those that are noted."""
    name = ALL_NUMBERS[stop.number]
    try:
        paths, flags = _paths(pid, memory, shape(name), stop.arguments)
    except OSError:  # it was killed meanwhile, or names no open file
        return None
    reads = not is_creating(flags) if name.startswith("open") else name in READING
    return (
        Call(name, paths, reads)
        if any(path.startswith((OUTPUT, *within)) for path in paths)
        else None
    )


def _paths(
    pid: int, memory: int, letters: str, arguments: tuple[int, ...]
) -> tuple[tuple[str, ...], int]:
    """Return the paths that the arguments name, and the flags among them."""
    paths: list[str] = []
    folder = flags = 0
    has_folder = False
    for letter, argument in zip(letters, arguments, strict=False):
        if letter == "f":
            paths.append(OUTPUT if argument in (1, 2) else _open_path(pid, argument))
        elif letter == "d":
            folder, has_folder = argument & 0xFFFFFFFF, True
        elif letter == "p":
            path = (
                os.pread(memory, _LONGEST_PATH, argument)
                .split(b"\0", 1)[0]
                .decode(errors="surrogateescape")
            )
            if has_folder and folder != _HERE and not path.startswith("/"):
                path = f"{_open_path(pid, folder)}/{path}".removesuffix(
                    "/"
                )  # no path: the open file itself
            paths.append(path)
        elif letter == "o":
            flags = argument
    return tuple(paths), flags


def _open_path(pid: int, fd: int) -> str:
    return os.readlink(f"/proc/{pid}/fd/{fd}")  # noqa: PTH115  # twice as fast, and there are very many


def _do_half(pid: int, memory: int, name: str, arguments: tuple[int, ...]) -> int | None:
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
