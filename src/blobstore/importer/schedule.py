"""The order in which an import makes its blobs; it depends on the plan only, not on the machine.

Of local files several blobs are made at once, so that the hash stage has several streams: a run of
each in turn. Small blobs are made many at a time.

Files on servers give their own order. A run is made when the last of its segments has come. Most
runs need one. What others need of earlier segments (an FP8 weight and its scales, a transposed
matrix, a global scale that is found in all experts) is held in a temporary file until their blob is
made. The runs of a blob come in the order of the file, not of the blob: they are written to their
places.
"""

from __future__ import annotations

import mmap
import sys
import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain

from blobstore.hashing.stage import HashStage
from blobstore.importer.declared import DeclaredFiles
from blobstore.importer.making import RUN, Run, runs_of
from blobstore.importer.outputs import PlannedBlob
from blobstore.importer.segments import (
    WAIT_S,
    LoadedBytes,
    LoadedSegment,
    Parts,
    Prefetch,
    Segments,
    Span,
    needs_of,
    united,
    whole,
)
from blobstore.io.durable import os_errors, reserve
from blobstore.source.folders import SourceFile
from blobstore.source.weights import SourceReaders

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
    """Yield the work of making ``blobs``, by number: the small ones, then the others.

    After an error only what comes before it in the plan: an earlier error may be found there.
    """
    small = (item for item in blobs.items() if not is_large(item[1].size))
    runs = buffers_of((number, run) for number, blob in small for run in runs_of(blob))
    together = (Work((some[0][0], 0), some, is_small=True) for some in runs)
    for work in chain(together, _large(blobs)):
        if work.place < first_error.place:
            yield work


def _large(blobs: Mapping[int, PlannedBlob]) -> Iterator[Work]:
    """Yield a run of each of the large blobs that are made at once in turn."""
    left = ((n, blob.size, runs_of(blob)) for n, blob in blobs.items() if is_large(blob.size))
    window: deque[tuple[int, int, Iterator[Run]]] = deque()
    nbytes = 0
    while True:
        while len(window) < (WINDOW if nbytes < _WINDOW_BYTES else _LEAST_WINDOW):
            if (blob := next(left, None)) is None:
                break
            window.append(blob)
            nbytes += blob[1]
        if not window:
            return
        number, size, runs = window.popleft()
        run = next(runs, None)
        if run is None:
            nbytes -= size
        else:
            yield Work((number, run.begin), ((number, run),))
            window.append((number, size, runs))


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


class HeldBytes:
    """Bytes of segments that later runs of one blob need, in a file without a name.

    ``spans``: what they need of each segment, by its number. ``last``: the segment with which all
    of them are made.
    """

    def __init__(self, spans: Mapping[int, Sequence[Span]], last: int) -> None:
        """Raises: StorageError if no folder for temporary files can be written."""
        self._spans = spans
        self.last = last
        self.parts: dict[str, list[tuple[int, memoryview]]] = defaultdict(list)
        nbytes = sum(end - begin for several in spans.values() for begin, end in several)
        with os_errors("hold", f"{nbytes:,} bytes"), tempfile.TemporaryFile() as file:
            reserve(file.fileno(), nbytes)  # to write a page without a place on the disk is fatal
            self._left = memoryview(mmap.mmap(file.fileno(), nbytes))

    def add(self, loaded: LoadedSegment) -> None:
        segment = loaded.segment
        for begin, end in self._spans.get(segment.number, ()):
            part, self._left = self._left[: end - begin], self._left[end - begin :]
            part[:] = loaded.data[begin - segment.begin : end - segment.begin]
            self.parts[segment.file.path].append((begin, part))


class _Order:
    """Which bytes of a blob the work makes that was listed so far."""

    def __init__(self) -> None:
        self._end = 0
        self._later: dict[int, int] = {}

    def follows(self, run: Run) -> bool:
        """Add a run; return True if all bytes before it are made."""
        is_next = run.begin == self._end
        self._later[run.begin] = run.end + run.gap
        while self._end in self._later:
            self._end = self._later.pop(self._end)
        return is_next


class FarWork:
    """What is made of ``segments``: the work of ``blobs``, by number, that are not made yet."""

    def __init__(
        self,
        blobs: Mapping[int, PlannedBlob],
        segments: Segments,
        prefetch: Prefetch,
        declared: DeclaredFiles,
        stage: HashStage,
    ) -> None:
        self._blobs = blobs
        self._segments = segments
        self._prefetch = prefetch
        self._declared = declared
        self._stage = stage
        self._loaded = LoadedBytes(_not_loaded)
        self.readers = SourceReaders(self._loaded.open)
        self._opens: dict[int, list[int]] = defaultdict(list)
        for number, blob in blobs.items():
            self._opens[self._first(blob)].append(number)
        self._pending: dict[int, list[tuple[int, Run]]] = defaultdict(list)
        self._held: dict[int, HeldBytes] = {}
        self._orders: dict[int, _Order] = defaultdict(_Order)

    def _first(self, blob: PlannedBlob) -> int:
        """Return the first segment that a blob has bytes of; -1 if it has none."""
        parts = (part for source in blob.sources for part in source.parts.values())
        found = (self._segments.numbers(whole(part)) for part in parts)
        return min((numbers[0] for numbers in found if numbers), default=-1)

    def works(self, first_error: FirstError, stopped: threading.Event) -> Iterator[Work]:
        """Yield the work, each as soon as its segments have come, until ``stopped`` is set.

        Raises: as `Prefetch.next`; DigestMismatchError; StorageError.
        """
        self._open(-1)
        yield from self._work_of(-1, None)
        for segment in self._segments.all:
            loaded = self._next(segment.number, first_error, stopped)
            if loaded is None:
                return
            loaded.use()
            self._declared.add(segment, loaded.data, loaded.release)
            self._open(segment.number)
            for held in self._held.values():
                held.add(loaded)
            yield from self._work_of(segment.number, loaded)
            loaded.release()
            self._held = {n: held for n, held in self._held.items() if held.last > segment.number}

    def _next(
        self, number: int, first_error: FirstError, stopped: threading.Event
    ) -> LoadedSegment | None:
        """Return a segment when it has come; None after an error. Hash meanwhile."""
        wait_s = 0.0
        while first_error.place >= (number,) and not stopped.is_set():
            loaded = self._prefetch.next(wait_s)
            if loaded is not None:
                return loaded
            wait_s = 0.0 if self._stage.work() else WAIT_S
        return None

    def _open(self, first: int) -> None:
        """List the runs of the blobs that begin with a segment, each with its last segment."""
        for number in self._opens.pop(first, ()):
            early: dict[int, list[Span]] = defaultdict(list)
            until = first
            for run in runs_of(self._blobs[number]):
                needs = [(need, self._segments.numbers(need)) for need in needs_of(run)]
                last = max((numbers[-1] for _, numbers in needs if numbers), default=first)
                until = max(until, last)
                self._pending[last].append((number, run))
                for need, numbers in needs:
                    for segment in (self._segments.all[one] for one in numbers if one < last):
                        span = max(need.begin, segment.begin), min(need.end, segment.end)
                        early[segment.number].append(span)
            if early:
                spans = {one: united(several) for one, several in early.items()}
                self._held[number] = HeldBytes(spans, until)

    def _work_of(self, segment: int, loaded: LoadedSegment | None) -> Iterator[Work]:
        small = []
        for number, run in self._pending.pop(segment, ()):
            is_small = not is_large(self._blobs[number].size)
            if is_small and number not in self._held:
                small.append((number, run))
                continue
            using = self._using(loaded, self._held.get(number))
            waits = self._orders[number].follows(run)
            yield Work((segment, number, run.begin), ((number, run),), is_small, using, waits)
        for runs in buffers_of(small):
            using = self._using(loaded, None)
            yield Work((segment, runs[0][0], 0), runs, is_small=True, using=using)

    def _using(
        self, loaded: LoadedSegment | None, held: HeldBytes | None
    ) -> AbstractContextManager[None]:
        if loaded is None:
            return nullcontext()
        loaded.use()
        segment = loaded.segment
        here = {segment.file.path: [(segment.begin, loaded.data)]}
        return self._reading(loaded, here, {} if held is None else held.parts)

    @contextmanager
    def _reading(self, loaded: LoadedSegment, *parts: Parts) -> Iterator[None]:
        with self._loaded.using(*parts):
            yield
        loaded.release()


def _not_loaded(file: SourceFile, begin: int, _buffer: memoryview) -> None:
    raise AssertionError(f"byte {begin:,} of {file.path} was not needed")
