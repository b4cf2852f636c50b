"""Slots: the number of requests at once is found by measurement."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from blobstore.io.http.slots import Slots


class Simulated:
    """Requests of 1 MB one after the other, to a server that is as fast as ``rate(level)`` says."""

    def __init__(self, rate: Callable[[int], float]) -> None:
        self._rate = rate
        self._now = 0.0
        self.slots = Slots(32, fixed=False, clock=lambda: self._now)

    def run(self, seconds: float) -> set[int]:
        """Return the levels that were seen."""
        end, seen = self._now + seconds, set()
        while self._now < end:
            seen.add(self.slots.level)
            with self.slots.slot() as moved:
                self._now += 1e6 / self._rate(self.slots.level)
                moved(10**6)
        return seen


def test_a_server_far_away_gets_all() -> None:
    far = Simulated(lambda level: 10e6 * level)
    assert far.run(5) == {2, 4, 8, 16, 32}
    assert far.slots.level == 32


@pytest.mark.parametrize(("limit", "level"), [(1, 2), (2, 2), (4, 4), (8, 8), (16, 16)])
def test_a_level_is_kept_only_if_it_brings_more(limit: int, level: int) -> None:
    near = Simulated(lambda level: 10e6 * min(level, limit))
    near.run(5)
    assert near.slots.level == level


def test_it_is_tried_again() -> None:
    limit = 4
    server = Simulated(lambda level: 100e6 * min(level, limit))
    server.run(5)
    assert server.slots.level == 4
    limit = 16
    server.run(40)
    assert server.slots.level == 16


def test_at_the_start_the_number_grows_as_fast_as_the_rate() -> None:
    now = 0.0
    slots = Slots(16, fixed=False, first=4, settle_s=0.3, clock=lambda: now)

    def bring(rate: float) -> int:
        """Move bytes for a window of 0.1 s, and return the level that follows."""
        nonlocal now
        for _ in range(64):
            now += 0.11 / 64
            with slots.slot() as moved:
                moved(int(rate * 0.11 / 64))
        return slots.level

    assert [bring(1e8), bring(2e8), bring(2e8)] == [8, 16, 8]
    assert [bring(4e8), bring(4e8)] == [8, 8]  # from now on windows are longer


def test_as_many_at_once_as_there_are_slots() -> None:
    slots, inside, most = Slots(3), 0, 0
    mutex, go = threading.Lock(), threading.Barrier(3)

    def ask() -> None:
        nonlocal inside, most
        with slots.slot():
            with mutex:
                inside += 1
                most = max(most, inside)
            go.wait(600)
            with mutex:
                inside -= 1

    threads = [threading.Thread(target=ask) for _ in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert (inside, most) == (0, 3)
