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


def test_as_many_at_once_as_there_are_slots() -> None:
    slots, inside, most = Slots(3), 0, 0
    mutex, go = threading.Lock(), threading.Barrier(3)

    def ask() -> None:
        nonlocal inside, most
        with slots.slot():
            with mutex:
                inside += 1
                most = max(most, inside)
            go.wait(10)
            with mutex:
                inside -= 1

    threads = [threading.Thread(target=ask) for _ in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (inside, most) == (0, 3)
