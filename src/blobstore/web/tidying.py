"""Memory: what large answers took goes back to the system when the server is idle.

glibc keeps freed memory for later, in an arena of each thread, and Python keeps garbage in cycles.
A server would hold many megabytes after one large answer.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

_IDLE_S = 0.5


@functools.cache
def _trim() -> Callable[[int], Any]:
    """Return glibc's ``malloc_trim``; where it is missing, a function that does nothing."""
    try:
        trim: Callable[[int], Any] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return lambda _: 0
    return trim


def give_back() -> None:
    """Collect garbage, and return freed memory to the system."""
    gc.collect()
    _trim()(0)


class Tidy:
    """Gives memory back when no request has been answered for half a second."""

    def __init__(self, app: ASGIApp, give_back: Callable[[], object] = give_back) -> None:
        self._app = app
        self._give_back = give_back
        self._running = 0
        self._later: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
            if not self._running:
                self._later = asyncio.get_running_loop().call_later(_IDLE_S, self._give_back)
