"""Slots: how many requests to a server run at once, found by measurement.

More connections bring more from a server that is far away, and less from one that is busy. So the
number starts low, and is doubled as long as that gains at least 5 % more bytes a second. Else the
lower number is kept, and the higher one is tried again later: after a second at first, after at
most ten. The time in which new connections gain speed does not count, except at the start: all of
them gain speed then, so as long as the rate grows the number is doubled every tenth of a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FIRST = 2
_GAIN = 1.05
_WINDOW_S = 0.25
_FIRST_WINDOW_S = 0.1
_REPORTS_A_SLOT = 2
"""Reports that a window lasts at least, for each slot."""
_AGAIN_S = 10
_REQUEST_COST = 32 * 2**10
"""Bytes that a request counts for besides its body: small ones are work, too."""


class Slots:
    """A semaphore of up to ``most`` slots. Safe to share between threads.

    ``fixed``: all of them from the start. ``first``: how many at the start, if not. ``settle_s``:
    how long a new level is not measured. ``clock`` gives seconds.
    """

    def __init__(
        self,
        most: int,
        *,
        fixed: bool = True,
        first: int = _FIRST,
        settle_s: float = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most = most
        self._fixed = fixed
        self._clock = clock
        self.level = most if fixed else min(first, most)
        self._taken = 0
        self._changed = threading.Condition()
        self._lower: tuple[int, float] | None = None
        self._settle_s = settle_s
        self._window_s = _FIRST_WINDOW_S if settle_s else _WINDOW_S
        self._again_s = 1.0 if settle_s else float(_AGAIN_S)
        self._again_at = 0.0
        self._begin_window(0)

    @contextmanager
    def slot(self) -> Iterator[Callable[[int], None]]:
        """Hold a slot; give a function that is told how many bytes the request moved.

        It may be told so in several parts, as they come.
        """
        with self._changed:
            while self._taken >= self.level:
                self._changed.wait()
            self._taken += 1
        try:
            yield self._moved
        finally:
            with self._changed:
                self._taken -= 1
                self._work += _REQUEST_COST
                self._changed.notify()

    def back_off(self) -> None:
        """Halve the number: the server asks for fewer requests."""
        with self._changed:
            self.level = self.level if self._fixed else max(1, self.level // 2)
            self._lower = None
            self._window_s = max(_WINDOW_S, self._settle_s)
            self._again_at = self._clock() + _AGAIN_S
            self._begin_window(self._settle_s)

    def _begin_window(self, settle_s: float) -> None:
        self._begun = self._clock() + settle_s
        self._work = 0
        self._reports = 0

    def _moved(self, nbytes: int) -> None:
        """Count bytes; at the end of a window choose the next level."""
        if self._fixed:
            return
        with self._changed:
            seconds = self._clock() - self._begun
            if seconds < 0:
                return
            self._work += nbytes
            self._reports += 1
            if seconds < self._window_s or self._reports < _REPORTS_A_SLOT * self.level:
                return
            level = self.level
            self._choose(self._work / seconds)
            is_first = self._window_s < _WINDOW_S
            self._begin_window(self._settle_s if self.level != level and not is_first else 0)

    def _choose(self, rate: float) -> None:
        now = self._clock()
        if self._lower is not None and rate < _GAIN * self._lower[1]:
            self.level = self._lower[0]
            self._lower = None
            self._window_s = max(_WINDOW_S, self._settle_s)
            self._again_at = now + self._again_s
            self._again_s = min(2 * self._again_s, _AGAIN_S)
        elif self.level < self.most and now >= self._again_at:
            self._lower = (self.level, rate)
            self.level = min(2 * self.level, self.most)
            self._changed.notify(self.level)
        else:
            self._lower = None
