"""Ctrl-C while a native library waits for a server that is silent.

Python tells a program of a signal when its main thread is back from native code. A request of
obstore may take more than a minute to give up. So another thread, which the kernel's signal wakes
through a socket (`signal.set_wakeup_fd`), ends the process if it did not end by itself. That is a
kill: what it leaves is what any killed command leaves.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from socket import socket

_GRACE_S = 5.0
_EXIT = 130
_ends = threading.Event()


def let_commands_end() -> None:
    """Allow `end_soon_when_interrupted`, in a process that is one command."""
    _ends.set()


def heed_interrupts() -> None:
    """From now on the command itself answers Ctrl-C, and goes on."""
    _ends.clear()


def end_soon_when_interrupted() -> None:
    """From now on let Ctrl-C end this command within five seconds.

    Nothing changes in a process that is more than a command, or that handles Ctrl-C itself.
    """
    if _ends.is_set() and threading.current_thread() is threading.main_thread():
        _begin()


@cache
def _begin() -> None:
    from socket import socketpair  # most commands need none

    hears, tells = socketpair()
    tells.setblocking(False)
    signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(hears, tells), daemon=True).start()


def _watch(hears: socket, _tells: socket) -> None:
    """Wait for Ctrl-C; ``_tells`` stays open as long."""
    while signal.SIGINT not in hears.recv(1) or not _is_ours():
        pass
    time.sleep(_GRACE_S)
    os.write(2, b"Error: interrupted\n")
    os._exit(_EXIT)


def _is_ours() -> bool:
    return _ends.is_set() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
