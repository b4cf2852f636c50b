"""Siblings: the rates of requests that run at once, so that a slow connection can be dropped.

One connection of many may be slow for its whole life: a bad path, a loaded server behind a name
with several addresses. Then the last range waits for it. A connection that brings less than a
quarter of what others bring, while it has two seconds more to go, is dropped, and the rest of its
range is asked for anew.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

_WINDOW_S = 1.0
_SLOW = 4
_WORTH_S = 2.0
_FEWEST = 2
_REMEMBERED = 16
_REMEMBERED_S = 10.0


class RangeRequest:
    """One request among its siblings. One thread uses it."""

    def __init__(self, siblings: Siblings, now: float) -> None:
        self._siblings = siblings
        self._since = self._begun = now
        self._total = self._window = 0
        self.rate: float | None = None

    def is_slow(self, nbytes: int, left: int) -> bool:
        """Count bytes that came, and return True if the other ``left`` are better asked for anew.

        It is also called, with 0, while nothing comes.
        """
        now = self._siblings.clock()
        self._total += nbytes
        self._window += nbytes
        seconds = now - self._since
        if seconds < _WINDOW_S:
            return False
        self.rate = self._window / seconds
        self._since, self._window = now, 0
        usual = self._siblings.usual_rate(self, now)
        if usual is None:
            return False
        return self.rate * _SLOW < usual and left > self.rate * _WORTH_S

    def mean_rate(self, now: float) -> float:
        """Return the bytes a second of the whole request."""
        return self._total / max(now - self._begun, 1e-3)


class Siblings:
    """The requests of one job, and those that ended lately. Safe to share between threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._running: set[RangeRequest] = set()
        self._ended: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._lock = threading.Lock()

    def start(self) -> RangeRequest:
        """Return a request that begins now."""
        run = RangeRequest(self, self.clock())
        with self._lock:
            self._running.add(run)
        return run

    def end(self, run: RangeRequest, *, whole: bool) -> None:
        """Forget a request, but for a while not the rate of one that brought all its bytes."""
        now = self.clock()
        with self._lock:
            self._running.discard(run)
            if whole:
                self._ended.append((now, run.mean_rate(now)))

    def usual_rate(self, one: RangeRequest, now: float) -> float | None:
        """Return the median rate of the others; None if there are fewer than two."""
        with self._lock:
            rates = [run.rate for run in self._running if run is not one and run.rate is not None]
            rates += [rate for at, rate in self._ended if now - at < _REMEMBERED_S]
        return statistics.median(rates) if len(rates) >= _FEWEST else None
