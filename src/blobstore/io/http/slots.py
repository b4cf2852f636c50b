"""Slots: how many requests to a server run at once, found by measurement.

More connections bring more from a server that is far away, and less from one that is busy. So the
number starts low, and is doubled as long as that gains at least 5 % more bytes a second. Else the
lower number is kept, and the higher one is tried again later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FIRST = 2
_GAIN = 1.05
_WINDOW_S = 0.25
_REQUESTS_A_SLOT = 2
"""Requests that a window lasts at least, for each slot."""
_AGAIN_S = 10
_REQUEST_COST = 32 * 2**10
"""Bytes that a request counts for besides its body: small ones are work, too."""


class Slots:
    """A semaphore of up to ``most`` slots. Safe to share between threads.

    ``fixed``: all of them from the start. ``clock`` gives seconds.
    """

    def __init__(
        self, most: int, *, fixed: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most = most
        self._fixed = fixed
        self._clock = clock
        self.level = most if fixed else min(_FIRST, most)
        self._taken = 0
        self._changed = threading.Condition()
        self._lower: tuple[int, float] | None = None
        self._again_at = 0.0
        self._begin_window()

    @contextmanager
    def slot(self) -> Iterator[Callable[[int], None]]:
        """Hold a slot; give a function that is told how many bytes the request moved."""
        with self._changed:
            while self._taken >= self.level:
                self._changed.wait()
            self._taken += 1
        moved = [0]
        try:
            yield moved.append
        finally:
            with self._changed:
                self._taken -= 1
                if not self._fixed:
                    self._note(sum(moved))
                self._changed.notify()

    def _begin_window(self) -> None:
        self._begun = self._clock()
        self._work = 0
        self._requests = 0

    def _note(self, nbytes: int) -> None:
        """Count a request; at the end of a window choose the next level."""
        self._work += nbytes + _REQUEST_COST
        self._requests += 1
        seconds = self._clock() - self._begun
        if seconds < _WINDOW_S or self._requests < _REQUESTS_A_SLOT * self.level:
            return
        self._choose(self._work / seconds)
        self._begin_window()

    def _choose(self, rate: float) -> None:
        now = self._clock()
        if self._lower is not None and rate < _GAIN * self._lower[1]:
            self.level = self._lower[0]
            self._lower = None
            self._again_at = now + _AGAIN_S
        elif self.level < self.most and now >= self._again_at:
            self._lower = (self.level, rate)
            self.level = min(2 * self.level, self.most)
            self._changed.notify(self.level)
        else:
            self._lower = None
