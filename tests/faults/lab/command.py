"""Our command in a child process, stopped at its system calls.

The child is a fork, so Python's start is paid once: a run with a fault takes as long as the
command's work, some 30 ms. It runs the real command line, ``blobstore ARGUMENTS…``, with its own
output and exit code.
"""

import atexit
import io
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from faults.lab.stops import CAN_STOP, OUTPUT, Action, Call, Decide, Listener, stop_at_calls
from faults.mounts import NotShownError

_CRASHED = 70
_HUNG_S = 240


@dataclass(slots=True)
class At:
    """Do ``action`` at the chosen call of that number (from 1); ``on``: at all from there on."""

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
    decide: Decide = lambda _call: None,
    before: Callable[[], None] = lambda: None,
) -> Done:
    """Run ``blobstore ARGUMENTS…`` in a fork of this process.

    With ``within``, its calls on paths below those folders, and its prints, are noted, and
    ``decide`` is asked about each. ``before`` is called in the child first. One that does nothing
    for four minutes is killed, and hung.
    """
    if within and not CAN_STOP:
        raise NotShownError("system calls can be stopped at on Linux on x86-64 only")
    outputs = [os.memfd_create(name) for name in ("out", "err")]
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        asked = theirs if within else None
        _be_the_command([*map(str, arguments)], outputs, asked, before)
    theirs.close()
    calls: list[Call] = []
    try:
        if within:
            hung = _watch(pid, ours, (OUTPUT, *map(str, within)), decide, calls)
        else:
            hung = not select.select([process := os.pidfd_open(pid)], [], [], _HUNG_S)[0]
            os.close(process)
        if hung:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out, err = (os.pread(fd, os.fstat(fd).st_size, 0).decode() for fd in outputs)
        return Done(code, out, err, calls, hung)
    finally:
        ours.close()
        for fd in outputs:
            os.close(fd)


def _be_the_command(
    arguments: list[str],
    outputs: list[int],
    asked: socket.socket | None,
    before: Callable[[], None],
) -> None:
    """Be the command; this never returns."""
    code = _CRASHED
    try:
        for fd, output in zip((1, 2), outputs, strict=True):
            os.dup2(output, fd)
        sys.stdout, sys.stderr = (io.TextIOWrapper(open(fd, "wb", closefd=False)) for fd in (1, 2))  # noqa: SIM115
        sys.argv = ["blobstore", *arguments]
        from blobstore.cli.main import main

        # Those of the experiment would remove its files when the command ends.
        atexit._clear()
        before()
        if asked is not None:
            socket.send_fds(asked, [b"."], [stop_at_calls()])
        main()
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
    pid: int, asked: socket.socket, within: tuple[str, ...], decide: Decide, calls: list[Call]
) -> bool:
    """Decide about every call of the command until it has ended; return whether it hung."""
    _, fds, _, _ = socket.recv_fds(asked, 1, 1)
    if not fds:
        raise NotShownError("this kernel can't stop a process at its system calls")
    listener = Listener(fds[0], pid)

    def answer(call: Call) -> Action | None:
        if not any(path.startswith(within) for path in call.paths):
            return None
        calls.append(call)
        return decide(call)

    try:
        listener.serve(answer, _HUNG_S)
    except TimeoutError:
        return True
    finally:
        listener.close()
    return False
