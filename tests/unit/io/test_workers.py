"""`each`: items in order, the first error with any threads, no thread left over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from blobstore.errors import StorageError
from blobstore.io.workers import each, results_of

JOBS = [1, 2, 3, 8]


@pytest.mark.parametrize("jobs", JOBS)
def test_every_item_is_done_once(jobs: int) -> None:
    done: list[int] = []
    each(range(200), done.append, jobs, name="t")
    assert sorted(done) == list(range(200))


def test_nothing_to_do() -> None:
    each([], pytest.fail, 3, name="t")


@pytest.mark.parametrize("jobs", JOBS)
def test_the_first_error_in_order_is_raised_and_nothing_is_begun_afterwards(jobs: int) -> None:
    begun: list[int] = []

    def do(item: int) -> None:
        begun.append(item)
        if item >= 5:
            time.sleep(0.05 if item == 5 else 0)
            raise ValueError(item)

    with pytest.raises(ValueError, match=r"^5$"):
        each(range(1000), do, jobs, name="t")
    assert sorted(begun) == list(range(len(begun)))
    assert len(begun) <= 5 + jobs


@pytest.mark.parametrize("jobs", JOBS)
def test_an_error_of_the_items_themselves_comes_after_those_of_what_was_begun(jobs: int) -> None:
    def items() -> Iterator[int]:
        yield 0
        raise KeyError("items")

    with pytest.raises(KeyError, match="items"):
        each(items(), lambda _: None, jobs, name="t")

    def fail(item: int) -> None:
        time.sleep(0.02)
        raise ValueError(item)

    with pytest.raises(ValueError, match=r"^0$"):
        each(items(), fail, jobs, name="t")


@pytest.mark.parametrize("interrupted", [0, 1, 2])
def test_a_thread_whose_start_is_interrupted_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    """As by Ctrl-C: the thread runs, and its starter does not know."""
    real, started = threading.Thread.start, 0

    def start(self: threading.Thread) -> None:
        nonlocal started
        real(self)
        started += 1
        if started == interrupted + 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    working: list[int] = []
    most = 0

    def do(item: int) -> None:
        nonlocal most
        working.append(item)
        most = max(most, item)
        time.sleep(0.05)
        working.remove(item)

    with pytest.raises(KeyboardInterrupt):
        each(range(10**6), do, 3, name="t")
    assert working == []
    last = most
    time.sleep(0.15)
    assert (working, most) == ([], last)


def test_an_interrupt_while_threads_work_waits_for_them_even_when_it_comes_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = threading.Thread.join
    waits = 0

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        nonlocal waits
        started.wait()
        waits += 1
        if waits <= 2:
            raise KeyboardInterrupt
        ends.set()
        real(self, timeout)

    started, ends = threading.Event(), threading.Event()
    working: list[int] = []

    def do(item: int) -> None:
        working.append(item)
        started.set()
        ends.wait()
        working.remove(item)

    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(KeyboardInterrupt):
        each(_after(started), do, 2, name="t")
    assert waits > 2
    assert working == []


def _after(started: threading.Event) -> Iterator[int]:
    yield 0
    started.wait()
    yield from range(1, 10**6)


def test_fewer_threads_than_wanted_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = threading.Thread.start, 0

    def start(self: threading.Thread) -> None:
        nonlocal started
        started += 1
        if started > 1:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    done: list[int] = []
    each(range(20), done.append, 4, name="t")
    assert done == list(range(20))


def test_no_thread_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError(f"can't start new thread {self.name}")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(StorageError, match="can't start a thread"):
        each(range(20), lambda _: pytest.fail("a worker runs"), 4, name="t")


def test_what_takes_its_time_is_told_to_stop() -> None:
    stop, began = threading.Event(), threading.Event()

    def work(item: str) -> str:
        if item == "long":
            began.set()
            assert stop.wait(60)
            return "ended"
        assert began.wait(60)
        raise ValueError(item)

    with pytest.raises(ValueError, match="short"):
        results_of(["long", "short"], work, 2, name="test", stop=stop)
    assert stop.is_set()


def test_results_are_in_the_order_of_their_items() -> None:
    assert results_of([3, 1, 2], lambda item: item * 2, 3, name="test") == [6, 2, 4]
    assert results_of([], lambda item: item, 3, name="test") == []
