"""Turns: as many threads as are of use go on, and the others wait."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from blobstore.importer.streaming import flow
from blobstore.importer.streaming.flow import Turns


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread go on by itself."""
    monkeypatch.setattr(flow, "_AGAIN_S", None)


def test_as_many_go_on_as_are_of_use() -> None:
    wanted = [1]
    turns = Turns(lambda: wanted[0])
    passed = [threading.Event() for _ in range(5)]

    def wait_for_turn(number: int) -> None:
        turns.wait(number)
        passed[number].set()

    with ThreadPoolExecutor(5) as pool:
        try:
            waiting = [pool.submit(wait_for_turn, number) for number in range(5)]
            assert waiting[0].result(300) is None
            wanted[0] = 3
            turns.check()
            wait(waiting[:3], 300)
            assert [one.is_set() for one in passed] == [True, True, True, False, False]
            wanted[0] = 2  # who has gone on is not called back
            turns.check()
        finally:
            turns.end()
        wait(waiting, 300)
        assert all(one.is_set() for one in passed)


def test_it_is_noticed_without_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "_AGAIN_S", 0.001)
    wanted = [0]
    turns = Turns(lambda: wanted[0])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(turns.wait, 0)
        wanted[0] = 1
        assert waiting.result(300) is None
