"""The order in which an import of local files makes its blobs.

Several blobs are made at once, so that the hash stage has several streams: a run of each in turn.
Consecutive small blobs are made many at a time. The order depends on the plan only, not on the
machine.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby

from blobstore.importer.making import RUN, Run, runs_of
from blobstore.importer.planning.outputs import PlannedBlob

WINDOW = 16
"""Blobs that are made at once: as many as the widest processors hash at once."""
_WINDOW_BYTES = 2**30
_LEAST_WINDOW = 4
"""Fewer blobs are made at once when they are that large: a killed import loses those it began."""
_SMALL = 2**16
"""Bytes of a blob that is made, hashed and written together with others."""
_ALIGNMENT = 64
"""Of a small blob in its buffer: a line of the processor's cache."""


Place = tuple[int, ...]
"""A place in the order of an import: locally the number of a blob, and an offset in it."""
_HERE: AbstractContextManager[None] = nullcontext()


class FirstError:
    """The error that comes first in an import's order. What comes behind it need not be made."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._error: Exception | None = None
        self.place: Place = (sys.maxsize,)

    def note(self, place: Place, error: Exception) -> None:
        """Keep the error of the work at ``place`` if it is the first so far."""
        with self._mutex:
            if place < self.place:
                self.place, self._error = place, error

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True)
class Work:
    """What one thread makes in one buffer: a run of a large blob, or several small blobs.

    ``runs``: with the numbers of their blobs in the plan. ``using``: what the thread reads the
    source within. ``waits``: earlier work makes all bytes of the blob before the run, so its buffer
    may wait until these are hashed.
    """

    place: Place
    runs: tuple[tuple[int, Run], ...]
    is_small: bool = False
    using: AbstractContextManager[None] = _HERE
    waits: bool = True


def is_large(nbytes: int) -> bool:
    """Return whether a blob of that size is made in runs of its own."""
    return nbytes > _SMALL


def room_of(run: Run) -> int:
    """Return the bytes that a small blob takes in a buffer."""
    return run.end + -run.end % _ALIGNMENT


def schedule(blobs: Mapping[int, PlannedBlob], first_error: FirstError) -> Iterator[Work]:
    """Yield the work of making ``blobs``, by number, in their order.

    After an error only what comes before it in the plan: an earlier error may be found there.
    """
    for work in _all_work(blobs):
        if work.place < first_error.place:
            yield work


def _all_work(blobs: Mapping[int, PlannedBlob]) -> Iterator[Work]:
    window = _Window()
    for is_small, group in groupby(blobs.items(), lambda item: not is_large(item[1].size)):
        if is_small:
            runs = ((number, run) for number, blob in group for run in runs_of(blob))
            for some in buffers_of(runs):
                yield Work((some[0][0], 0), some, is_small=True)
            continue
        for number, blob in group:
            window.add(number, blob)
            yield from window.runs()
    yield from window.runs(until_empty=True)


def buffers_of(small: Iterable[tuple[int, Run]]) -> Iterator[tuple[tuple[int, Run], ...]]:
    """Yield small blobs, each of one run, as many at a time as one buffer holds."""
    taken: list[tuple[int, Run]] = []
    room = 0
    for number, run in small:
        if taken and room + room_of(run) > RUN:
            yield tuple(taken)
            taken, room = [], 0
        taken.append((number, run))
        room += room_of(run)
    if taken:
        yield tuple(taken)


class _Window:
    """The large blobs that are made at once."""

    def __init__(self) -> None:
        self._blobs: deque[tuple[int, int, Iterator[Run]]] = deque()
        self._nbytes = 0

    def add(self, number: int, blob: PlannedBlob) -> None:
        self._blobs.append((number, blob.size, runs_of(blob)))
        self._nbytes += blob.size

    def runs(self, *, until_empty: bool = False) -> Iterator[Work]:
        """Yield a run of each blob in turn, while the window is full."""
        while self._blobs and (until_empty or self._is_full()):
            number, size, runs = self._blobs.popleft()
            run = next(runs, None)
            if run is None:
                self._nbytes -= size
            else:
                yield Work((number, run.begin), ((number, run),))
                self._blobs.append((number, size, runs))

    def _is_full(self) -> bool:
        count = len(self._blobs)
        return count >= WINDOW or (count >= _LEAST_WINDOW and self._nbytes >= _WINDOW_BYTES)
