"""The crew of a streamed import: threads that fetch segments, and threads that make and hash.

The tasks are taken in one order. After an error no other is taken; the error of the first task, in
that order, is raised, whatever the number of threads.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from blobstore.hashing.stage import HashStage
from blobstore.importer.buffers import Buffer, BufferPool
from blobstore.importer.making import RunMaker
from blobstore.importer.planning.outputs import PlannedBlob
from blobstore.importer.schedule import room_of
from blobstore.importer.streaming.agenda import Agenda, Arrival
from blobstore.importer.streaming.arrived import ArrivedSegments
from blobstore.importer.streaming.arriving import ArrivingBytes
from blobstore.importer.streaming.flow import FileHashes, Gate, Loaded, Order, Tasks, Turns
from blobstore.importer.streaming.keeping import StreamedBlobs
from blobstore.importer.streaming.pieces import PIECE, StreamedPiece
from blobstore.importer.streaming.ring import Ring
from blobstore.importer.streaming.segments import SourceSegment
from blobstore.importer.streaming.span_sums import SpanSums
from blobstore.importer.streaming.worklog import WorkLog
from blobstore.io.workers import Progress, each
from blobstore.source.fetching import Fetcher
from blobstore.source.weights import SourceReaders

_WAIT_S = 0.05
"""How long a thread waits for a buffer before it checks again whether it can hash."""


class Crew:
    """What the threads of one streamed import share.

    ``blobs``: of the plan. ``fetchers``: by the path of a file.
    """

    def __init__(
        self,
        blobs: Sequence[PlannedBlob],
        agenda: Agenda,
        written: StreamedBlobs,
        arrived: ArrivedSegments,
        hashes: FileHashes,
        sums: SpanSums,
        stage: HashStage,
        log: WorkLog | None,
        arriving: ArrivingBytes | None,
        fetchers: Mapping[str, Fetcher],
        progress: Progress,
    ) -> None:
        self._blobs = blobs
        self._written = written
        self._arrived = arrived
        self._hashes = hashes
        self._sums = sums
        self._stage = stage
        self._log = log
        self._arriving = arriving
        self._fetchers = fetchers
        self._folders = list({id(one): one for one in fetchers.values()}.values())
        self._turns = Turns(lambda: max((one.wanted for one in self._folders), default=1))
        self._progress = progress
        self._maker = RunMaker(SourceReaders(arrived.open))
        self._arrivals = agenda.arrivals()
        self._trusted: dict[int, list[int]] = defaultdict(list)
        for number in agenda.numbers:
            self._trusted[agenda.trusted_at(number)].append(number)
        self._tasks = Tasks()
        self._gates = (Gate(self._hash), Gate(self._open), Gate(self._end))
        self._mutex, self._fetching = threading.Lock(), threading.Lock()
        self._unhashed = 0
        self._consecutive: dict[int, _Consecutive] = defaultdict(_Consecutive)
        self._are_all_fetched = False
        self._errors: list[tuple[Order, BaseException]] = []

    def run(self, fetching: int, making: int, ring: Ring, buffers: BufferPool) -> None:
        """Do everything of the agenda, with so many threads that fetch, and that make.

        Raises: the errors of the fetchers; as `RunMaker.make`; DigestMismatchError; StorageError.
        """
        self._ring, self._buffers = ring, buffers
        roles: list[Callable[[], None]] = [self._make] * making
        roles[:0] = [partial(self._fetch, number) for number in range(fetching)]
        stop = _Stop(self._stop)
        each(roles, _call, len(roles), name="stream", stop=stop, least=len(roles))
        if self._errors:
            raise min(self._errors, key=lambda one: one[0])[1]
        self._stage.work_while(lambda: True)

    def _stop(self) -> None:
        """End the work, also that of threads that wait."""
        self._tasks.stop()
        self._ring.close()
        self._turns.end()
        for fetcher in self._folders:
            fetcher.cancel()

    def _fail(self, order: Order, error: BaseException) -> None:
        with self._mutex:
            self._errors.append((order, error))
        self._stop()

    def _fetch(self, number: int) -> None:
        """Fetch the segments that remain, one after the other, as the thread of that number."""
        while (loaded := self._next(number)) is not None:
            segment = loaded.arrival.segment
            try:
                self._fill(segment, loaded.part.data)
                self._gates[0].ready(loaded)
            except BaseException as error:  # noqa: BLE001  # `run` raises the first one
                if not self._tasks.is_stopped:  # else it was cancelled
                    self._fail((segment.number, -1, 0), error)
                return
            self._tasks.wake()
            self._turns.check()

    def _fill(self, segment: SourceSegment, data: memoryview) -> None:
        fetcher, file = self._fetchers[segment.file.path], segment.file
        if self._arriving is not None:
            self._arriving.fill(fetcher, segment, data)
        else:
            fetcher.fill(file.name, file.identity, segment.begin, data)

    def _next(self, number: int) -> Loaded | None:
        """Return the next segment, with memory for it, when a thread of that number is of use."""
        self._turns.wait(number)
        with self._fetching:
            arrival = None if self._tasks.is_stopped else next(self._arrivals, None)
            if arrival is None:
                self._are_all_fetched = True
                self._turns.end()
                self._tasks.wake_all()
                return None
            part = self._ring.take(arrival.segment.nbytes, arrival.segment.begin)
            if part is None:
                return None
            loaded = Loaded(arrival, part)
            for gate in self._gates:
                gate.expect(loaded)
            return loaded

    def _hash(self, loaded: Loaded) -> None:
        """Behind the first gate: hash a segment, if its file is hashed."""
        with self._mutex:
            self._unhashed += 1
        self._hashes.add(loaded, self._hashed)

    def _hashed(self, loaded: Loaded) -> None:
        with self._mutex:
            self._unhashed -= 1
        self._gates[1].ready(loaded)

    def _open(self, loaded: Loaded) -> None:
        """Behind the second gate: hold what later pieces need, and let the others be made."""
        arrival, data = loaded.arrival, loaded.part.data
        loaded.sums = self._sums.add(arrival.segment, data)
        if arrival.held:
            held = self._arrived.held
            loaded.held = tuple(held.write(arrival.segment, data, arrival.held))
            held.keep(loaded.number, arrival.held_until)
        tasks = list(_tasks_of(arrival))
        loaded.left = len(tasks)
        for pieces in tasks:
            first = pieces[0]
            if first.is_small:
                do = partial(self._make_small, loaded, pieces)
            else:
                consecutive = self._consecutive[first.number].then(first)
                self._consecutive[first.number] = consecutive
                do = partial(self._make_large, loaded, first, consecutive.since)
            self._tasks.add((loaded.number, first.number, first.run.begin), do)
        if not tasks:
            self._finish(loaded)

    def _finish(self, loaded: Loaded) -> None:
        self._gates[2].ready(loaded)  # first: a kill loses what is in memory, and little more
        self._ring.give_back(loaded.part)

    def _end(self, loaded: Loaded) -> None:
        """Behind the last gate: everything of a segment is done, and of all before it."""
        if self._log is not None:
            self._log.append(loaded.done())
        if self._arriving is not None:
            self._arriving.done(loaded.number)
        self._arrived.held.done(loaded.number)
        self._written.trust(self._trusted.pop(loaded.number, []))
        if self._is_done:
            self._tasks.wake_all()

    def _make(self) -> None:
        """Make and hash until everything is done."""
        while not self._tasks.is_stopped:
            order: Order = (-1, -1, 0)
            try:
                if self._hashes_first() and self._stage.work():
                    continue
                # First a buffer: what is begun must be able to end, since others wait behind it.
                buffer = self._buffer()
                task = self._tasks.take() if buffer is not None else None
                if buffer is not None and task is not None:
                    order, do = task
                    do(buffer)
                    continue
                if buffer is not None:
                    buffer.release()
                if not self._stage.work() and not self._waited():
                    return
            except BaseException as error:  # noqa: BLE001  # `run` raises the first one
                self._fail(order, error)

    def _hashes_first(self) -> bool:
        return self._unhashed > 0 or self._stage.is_full or self._buffers.is_empty

    def _waited(self) -> bool:
        """Wait for something to do; return False if nothing will come."""
        with self._tasks.changed:
            if self._tasks or self._stage.ready or self._tasks.is_stopped:
                return True
            if self._is_done:
                return False
            self._tasks.changed.wait()
            return True

    @property
    def _is_done(self) -> bool:
        return self._are_all_fetched and all(gate.is_empty for gate in self._gates)

    def _make_large(self, loaded: Loaded, piece: StreamedPiece, since: int, buffer: Buffer) -> None:
        run, blob = piece.run, self._blobs[piece.number]
        data = buffer.at(run.begin, run.end - run.begin)
        with self._arrived.using(loaded.number, loaded.part.data):
            beside = self._maker.make(run, data, blob.options)
        done = self._written.put(piece.number, run, data, beside, buffer, since=since)
        loaded.pieces.append(done)
        self._done(loaded, [piece])

    def _make_small(self, loaded: Loaded, pieces: Sequence[StreamedPiece], buffer: Buffer) -> None:
        made, begin = [], 0
        with self._arrived.using(loaded.number, loaded.part.data):
            for piece in pieces:
                made.append(buffer.part(begin, piece.run.end))
                self._maker.make(piece.run, made[-1], self._blobs[piece.number].options)
                begin += room_of(piece.run)
        numbers = [piece.number for piece in pieces]
        digests = self._written.put_small(numbers, made)
        buffer.release()
        loaded.small += zip(numbers, digests, strict=True)
        self._done(loaded, pieces)

    def _buffer(self) -> Buffer | None:
        """Return a buffer, hashing until one is free; None when the work ends."""
        while not self._tasks.is_stopped:
            buffer = self._buffers.try_take()
            if buffer is None and not self._stage.work():
                buffer = self._buffers.try_take(_WAIT_S)
            if buffer is not None:
                return buffer
        return None

    def _done(self, loaded: Loaded, pieces: Sequence[StreamedPiece]) -> None:
        """Note that a task of a segment is done."""
        with self._mutex:
            loaded.left -= 1
            is_last = not loaded.left
        if is_last:
            self._finish(loaded)
        for piece in pieces:
            self._progress(piece.run.source_bytes, self._blobs[piece.number].name)


@dataclass(frozen=True, slots=True)
class _Consecutive:
    """Consecutive pieces of a blob, one behind the other in the order of the tasks.

    ``since``: the offset of the first one; ``end``: of what follows.
    """

    since: int = 0
    end: int = 0

    def then(self, piece: StreamedPiece) -> _Consecutive:
        """Return it with the next piece, or that piece alone."""
        run = piece.run
        since = self.since if run.begin == self.end else run.begin
        return _Consecutive(since, run.end + run.gap)


class _Stop(threading.Event):
    """An event that ends the work when it is set."""

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__()
        self._do = stop

    def set(self) -> None:
        super().set()
        self._do()


def _call(role: Callable[[], None]) -> None:
    role()


def _tasks_of(arrival: Arrival) -> Iterator[Sequence[StreamedPiece]]:
    """Yield what is made in one buffer: a piece, or several small blobs."""
    small: list[StreamedPiece] = []
    room = 0
    for piece in arrival.pieces:
        if not piece.is_small:
            yield (piece,)
            continue
        if room + room_of(piece.run) > PIECE:
            yield tuple(small)
            small, room = [], 0
        small.append(piece)
        room += room_of(piece.run)
    if small:
        yield tuple(small)
