"""Workers: threads that share one job, none of which goes on when the job has ended.

A `ThreadPoolExecutor` does not promise that: it does not wait for a thread whose start was
interrupted by Ctrl-C, because it notes a thread after its start only (python/cpython@3.11
Lib/concurrent/futures/thread.py `_adjust_thread_count`). Such a thread would write to files that
its caller has closed or removed meanwhile.
"""

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

from blobstore.errors import BlobStoreError, StorageError, UsageError
from blobstore.io.budget import Cancellation

_T = TypeVar("_T")
_R = TypeVar("_R")


def each(
    items: Iterable[_T],
    do: Callable[[_T], None],
    jobs: int,
    *,
    name: str,
    stop: threading.Event | None = None,
) -> None:
    """Call ``do`` with each of ``items`` in ``jobs`` threads, which take the items in order.

    After an error, or an interrupt, no other item is taken, and the call waits for those that were
    taken. ``stop`` is set then: a long ``do`` may check it, and end early.

    Raises: the error of the first item, in their order, that fails, whatever the number of threads;
    StorageError when no thread can be started.
    """
    stop = stop or threading.Event()
    numbered = enumerate(items)
    taking = threading.Lock()
    errors: dict[float, BaseException] = {}

    def take() -> tuple[int, _T] | None:
        with taking:
            return None if stop.is_set() else next(numbered, None)

    def work() -> None:
        order = math.inf  # an error of the items themselves: those of items come before it
        try:
            while (item := take()) is not None:
                order, value = item
                do(value)
                order = math.inf
        except BaseException as error:  # noqa: BLE001  # the first one is raised below
            errors[order] = error
            stop.set()

    started = [
        threading.Thread(target=work, name=f"{name}-{number}") for number in range(max(1, jobs))
    ]
    try:
        for number, thread in enumerate(started):
            try:
                thread.start()
            except RuntimeError as error:
                if number == 0:  # else the others do the work
                    raise StorageError(f"can't start a thread: {error}") from error
        for thread in filter(threading.Thread.is_alive, started):
            thread.join()
    finally:
        _end(stop, started)
    if errors:
        raise errors[min(errors)]


def _end(stop: threading.Event, started: Sequence[threading.Thread]) -> None:
    """Let no thread take anything, and return when none works. Ctrl-C does not end that.

    A thread is alive before it takes its first item, even if its start was interrupted.
    """
    stop.set()
    while True:
        try:
            for thread in filter(threading.Thread.is_alive, started):
                thread.join()
        except KeyboardInterrupt:
            continue
        return


def results_of(
    items: Sequence[_T],
    do: Callable[[_T], _R],
    jobs: int,
    *,
    name: str,
    stop: threading.Event | None = None,
) -> list[_R]:
    """Return what ``do`` gives for each of ``items``, in their order. As `each`."""
    results: dict[int, _R] = {}

    def work(number: int) -> None:
        results[number] = do(items[number])

    each(range(len(items)), work, min(jobs, len(items)), name=name, stop=stop)
    return [results[number] for number in range(len(items))]


def batches(items: Iterable[_T], cost: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    """Yield consecutive items that cost ``most`` together, or one that costs more."""
    group: list[_T] = []
    total = 0
    for item in items:
        if group and total + cost(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += cost(item)
    if group:
        yield group


@contextmanager
def run_in_pool(
    items: Sequence[_T], do: Callable[[_T, Cancellation], _R], jobs: int
) -> Iterator[Iterator[_R]]:
    """Give what ``do`` makes of each of ``items``, which wait for servers, in their order.

    The first one that fails, in whatever order, cancels the others, and so does leaving the block:
    an interrupt does not wait for servers. Raises: the first error.
    """
    failures: list[BlobStoreError] = []
    cancellation = Cancellation()

    def work(item: _T) -> _R:
        try:
            cancellation.check(item)
            return do(item, cancellation)
        except BlobStoreError as error:
            failures.append(error)
            cancellation.set()
            raise

    with ThreadPoolExecutor(max(1, min(jobs, len(items)))) as pool:
        try:
            yield pool.map(work, items)
        except BlobStoreError as error:
            if error in failures:  # else it is the caller's own
                raise failures[0] from None
            raise
        finally:
            cancellation.set()
            pool.shutdown(wait=False, cancel_futures=True)


def threads(jobs: int | None) -> int:
    """Return how many threads a user asks for: None is one for each core that this process may use.

    Raises: UsageError for less than one.
    """
    if jobs is not None:
        if jobs < 1:
            raise UsageError(f"at least one thread is needed, not {jobs}")
        return jobs
    # A container or taskset may leave fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress(Protocol):
    """A callback for progress: any function of two arguments.

    It is called from any thread, every few megabytes, with the number of further bytes that are
    done and the blob, tensor or file that they are of. The first call may report all bytes that
    need not be read, because an earlier import has made their blobs. If it has a method ``begin``,
    that is called first with the number of all bytes, and again when something else begins.
    """

    def __call__(self, nbytes: int, name: str, /) -> object:
        """Take note of ``nbytes`` more bytes."""


def start_progress(progress: Progress | None, total: int) -> Progress:
    """Report ``total`` bytes to ``progress`` and return it; `no_progress` if it is None."""
    if progress is None:
        return no_progress
    if (begin := getattr(progress, "begin", None)) is not None:
        begin(total)
    return progress


def no_progress(_nbytes: int, _name: str, /) -> None:
    """Progress that is not shown."""
