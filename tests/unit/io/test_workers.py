"""`each`: items in order, the first error with any threads, no thread left over."""

import threading

import pytest

from blobstore.errors import StorageError
from blobstore.io.workers import each, results_of

WAIT_S = 600
MANY = range(10**6)


def running() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("each-")]


@pytest.mark.parametrize("jobs", [1, 3])
def test_results_are_in_the_order_of_their_items(jobs: int) -> None:
    assert results_of([3, 1, 2] * 70, lambda item: item * 2, jobs, name="each") == [6, 2, 4] * 70
    assert results_of([], lambda _: pytest.fail("an item"), jobs, name="each") == []


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_first_error_in_order_is_raised_and_nothing_is_begun_afterwards(jobs: int) -> None:
    begun: list[int] = []
    later = threading.Event()

    def do(item: int) -> None:
        begun.append(item)
        if item > 5:
            later.set()
        if item == 5 and jobs > 1:
            assert later.wait(WAIT_S)
        if item >= 5:
            raise ValueError(item)

    with pytest.raises(ValueError, match=r"^5$"):
        each(range(1000), do, jobs, name="each")
    assert sorted(begun) == list(range(len(begun)))
    assert len(begun) <= 5 + jobs


def test_interrupts_wait_for_threads_even_when_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    real, waits = threading.Thread.join, 0
    started, ends = threading.Event(), threading.Event()

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        nonlocal waits
        assert started.wait(WAIT_S)
        waits += 1
        if waits <= 2:
            raise KeyboardInterrupt
        ends.set()
        real(self, timeout)

    def do(_item: int) -> None:
        started.set()
        assert ends.wait(WAIT_S)

    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(KeyboardInterrupt):
        each(MANY, do, 2, name="each")
    assert waits > 2
    assert running() == []


def test_fewer_threads_do_the_work_and_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real, allowed = threading.Thread.start, 1

    def start(self: threading.Thread) -> None:
        nonlocal allowed
        if not allowed:
            raise RuntimeError("can't start new thread")
        allowed -= 1
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    done: list[int] = []
    each(range(20), done.append, 4, name="each")
    assert done == list(range(20))
    with pytest.raises(StorageError, match="can't start a thread"):
        each(range(20), lambda _: pytest.fail("a thread runs"), 4, name="each")


def test_a_failure_stops_work_that_takes_long() -> None:
    stop, began = threading.Event(), threading.Event()

    def work(item: str) -> None:
        if item == "long":
            began.set()
            assert stop.wait(WAIT_S)
            return
        assert began.wait(WAIT_S)
        raise ValueError(item)

    with pytest.raises(ValueError, match="short"):
        results_of(["long", "short"], work, 2, name="each", stop=stop)
    assert stop.is_set()
