"""RateLimit: bytes a second of all transfers of one job together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from blobstore.errors import UsageError

SLOWEST_LIMIT = 16 * 2**10
_BURST_S = 0.25


class RateLimit:
    """A token bucket. Safe to share between threads.

    ``rate``: bytes a second. ``wait`` waits for so many seconds, or less.

    Raises: UsageError for less than 16 KiB a second, with which no request would end in time.
    """

    def __init__(
        self,
        rate: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        if rate < SLOWEST_LIMIT:
            raise UsageError(f"a limit of {rate:,} bytes a second: at least {SLOWEST_LIMIT:,}")
        self.rate = rate
        self._clock = clock
        self._wait = wait
        self._paid_until = clock()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """Count bytes that came, and wait until so many are allowed."""
        with self._lock:
            now = self._clock()
            start = max(self._paid_until, now - _BURST_S)
            self._paid_until = start + nbytes / self.rate
            left = self._paid_until - now
        if left > 0:
            self._wait(left)
