"""Ctrl-C while a native library waits for a server that is silent.

Python tells a program of a signal when its main thread is back from native code. A request of
obstore may take more than a minute to give up. So another thread, which the kernel's signal wakes
through a socket (`signal.set_wakeup_fd`), ends the process if it did not end by itself. That is a
kill: what it leaves is what any killed command leaves.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from functools import cache

_GRACE_S = 5.0
_EXIT = 130


@cache
def end_soon_when_interrupted() -> None:
    """From now on let Ctrl-C end this process within five seconds; a second call does nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    hears, tells = socket.socketpair()
    tells.setblocking(False)
    signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(hears, tells), daemon=True).start()


def _watch(hears: socket.socket, _tells: socket.socket) -> None:
    """Wait for Ctrl-C; ``_tells`` stays open as long."""
    while signal.SIGINT not in hears.recv(1):
        pass
    time.sleep(_GRACE_S)
    os.write(2, b"Error: interrupted\n")
    os._exit(_EXIT)
