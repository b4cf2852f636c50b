"""The order in which an import makes its blobs; it depends on the plan only, not on the machine.

Of local files several blobs are made at once, so that the hash stage has several streams: a run of
each in turn. Small blobs are made many at a time.

Files on servers give their own order. A run is made when the last of its segments has come. Most
runs need one. What others need of earlier segments (an FP8 weight and its scales, a transposed
matrix, a global scale of all experts) is spilled to a temporary file until their blob is
made. The runs of a blob come in the order of the file, not of the blob: they are written to their
places.

A server may declare the digest of a file. It is that of all bytes, so it is known at the end of the
file only. A blob that is made of such files is *unverified* until then: no later import finds it by
its key. An import that is killed goes on in the middle of a file: it has noted its unverified
blobs, and the state of the file's hash at an offset before which all bytes belong to finished
blobs. The next import hashes the file from there. What was made of later bytes is made again, so no
byte becomes a model that the digest does not cover. The notes of one import belong together, by a
number that is drawn for it: of two imports at the same time, one might have fetched other bytes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from struct import Struct
from typing import NamedTuple

from blobstore.errors import DigestMismatchError
from blobstore.hashing import Sha256, Stream
from blobstore.hashing.stage import BlobHash, HashStage, Piece
from blobstore.importer.making import RUN, Run, runs_of
from blobstore.importer.outputs import PlannedBlob
from blobstore.importer.segments import (
    WAIT_S,
    Buffer,
    BufferPool,
    LoadedBytes,
    LoadedFile,
    LoadedSegment,
    Parts,
    Segment,
    Segments,
    Span,
    merge_spans,
    needs_of,
    whole,
)
from blobstore.io.durable import os_errors, reserve
from blobstore.io.workers import batches
from blobstore.source.folders import SourceFile
from blobstore.source.weights import Fetcher, SourceReaders
from blobstore.store.ports import Finished, Session

_PIECE = 2**20
# Bytes that may wait to be hashed before threads that make blobs hash them first.
_BEHIND = 2 * 2**20
_STATE_NBYTES = 128
_STATE_HEAD = Struct(">Q16sB")
STATES_EVERY_S = 1.0
"""A killed import hashes what was hashed since then again, and makes its blobs again."""


class _State(NamedTuple):
    offset: int
    stream: bytes
    number: bytes

    def encode(self) -> bytes:
        """Return a small blob of always the same size, because blobs are found by key and size."""
        head = _STATE_HEAD.pack(self.offset, self.number, len(self.stream))
        return (head + self.stream).ljust(_STATE_NBYTES, b"\0")

    @classmethod
    def decode(cls, raw: bytes) -> _State:
        offset, number, length = _STATE_HEAD.unpack_from(raw)
        return cls(offset, raw[_STATE_HEAD.size :][:length], number)


_FIRST = _State(0, b"", bytes(16))


@dataclass(slots=True)
class _File:
    """A file that is hashed.

    ``unfinished``: where the bytes of its blobs begin, and their numbers; the first one is last.
    ``state``: the last one that may be noted; ``passed``: those at the ends of later segments.
    """

    file: SourceFile
    hash: BlobHash
    state: _State
    unfinished: list[tuple[int, int]]
    passed: deque[_State] = field(default_factory=deque)
    is_noted: bool = True
    is_verified: bool = False


class DeclaredFiles:
    """The files with a declared digest that ``blobs`` are made from, by number.

    ``keys`` and ``sizes``: of all blobs of the plan. Safe to share between threads.
    """

    def __init__(
        self,
        blobs: Mapping[int, PlannedBlob],
        keys: Sequence[str],
        sizes: Sequence[int],
        session: Session,
        stage: HashStage,
    ) -> None:
        self._blobs = blobs
        self._keys = keys
        self._sizes = sizes
        self._session = session
        self._stage = stage
        self._number = os.urandom(16)
        self._extents = {number: _extents(blob) for number, blob in blobs.items()}
        self._files: dict[str, _File] = {}
        self._finished: dict[int, Finished] = {}
        self._mutex = threading.RLock()
        self._noted_at = time.monotonic()
        self._behind = 0

    @property
    def offsets(self) -> dict[str, int]:
        return {path: one.state.offset for path, one in self._files.items()}

    @property
    def is_behind(self) -> bool:
        return self._behind > _BEHIND

    def recall(self, *, verify: bool) -> dict[int, Finished]:
        """Return the unverified blobs of an import that was killed, by number.

        Its files are hashed from where it had come to. Raises: StorageError; DigestMismatchError
        for a file that it had hashed to its end.
        """
        files = {
            part.file.path: part.file
            for number, blob in self._blobs.items()
            for part in blob.parts
            if part.file.path in self._extents[number]
        }
        states = {path: self._noted_state(file) for path, file in files.items()}
        finished = self._find(states, verify=verify)
        if finished is None:
            states, finished = dict.fromkeys(files, _FIRST), {}
        for path, file in files.items():
            self._files[path] = self._open_file(file, states[path]._replace(number=self._number))
        for number, blob in finished.items():
            self.note_finished(number, blob)
        for one in self._files.values():
            if one.state.offset:
                self._note(one)
            if one.state.offset == one.file.size:
                self._end(one, one.hash.stream)
        return finished

    def _noted_state(self, file: SourceFile) -> _State:
        blob = self._session.recall(_key_of(file), _STATE_NBYTES, verify=True)
        if blob is None:
            return _FIRST
        with self._session.open(blob) as reader:
            return _State.decode(reader.read(0, _STATE_NBYTES))

    def _find(self, states: Mapping[str, _State], *, verify: bool) -> dict[int, Finished] | None:
        """Return the blobs that an import made of the bytes before its files' states.

        None if the states are of no use: they are those of several imports, or a blob that begins
        before one has to be made.
        """
        numbers = {state.number for state in states.values() if state.offset}
        if len(numbers) != 1:
            return None
        (noted_by,) = numbers
        blobs = {}
        for number, extents in self._extents.items():
            blob = None
            if all(end <= states[path].offset for path, (_, end) in extents.items()):
                blob = self._session.recall(
                    self._unverified_key(number, noted_by), self._sizes[number], verify=verify
                )
            if blob is not None:
                blobs[number] = blob
            elif any(begin < states[path].offset for path, (begin, _) in extents.items()):
                return None
        return blobs

    def _open_file(self, file: SourceFile, state: _State) -> _File:
        stream = Sha256.resumed(state.stream) if state.offset else Sha256()
        hashed = BlobHash(self._stage, file.size, lambda _: None, (stream, state.offset))
        unfinished = [
            (extents[file.path][0], number)
            for number, extents in self._extents.items()
            if file.path in extents
        ]
        return _File(file, hashed, state, sorted(unfinished, reverse=True))

    def add(self, segment: Segment, data: memoryview, hashed: Callable[[], None]) -> None:
        """Hash a segment, if its file is; ``hashed`` is called when its bytes may be overwritten.

        `HashStage.work` raises DigestMismatchError, with ``path``, at the end of a file that has
        another digest.
        """
        one = self._files.get(segment.file.path)
        if one is None:
            hashed()
            return
        with self._mutex:
            self._behind += segment.nbytes
        for begin in range(0, segment.nbytes, _PIECE):
            part = data[begin : begin + _PIECE]
            piece = Piece(len(part), part.toreadonly)
            if begin + _PIECE >= segment.nbytes:
                piece = Piece(
                    len(part), piece.read, hashed, partial(self._finish_segment, one, segment)
                )
            one.hash.add(segment.begin + begin, piece)

    def _finish_segment(self, one: _File, segment: Segment, stream: Stream) -> None:
        with self._mutex:
            self._behind -= segment.nbytes
            if isinstance(stream, Sha256):  # it is: see `_open_file`
                one.passed.append(_State(segment.end, stream.state(), self._number))
            self._go_on(one)
            if segment.end == one.file.size:
                self._end(one, stream)

    def _end(self, one: _File, stream: Stream) -> None:
        """Let the blobs of a file be found that has its declared digest."""
        file = one.file
        if file.declared is None or stream.digest().hex() != file.declared.hex:
            one.state = _FIRST
            one.passed.clear()  # blobs that are finished later must not note its end
            self._note(one)  # the next import must not go on with it
            raise DigestMismatchError(
                f"{file.path}: its bytes are not those of {file.declared}, which its server"
                " declares",
                path=file.path,
            )
        one.is_verified = True
        for number, extents in self._extents.items():
            if file.path in extents and number in self._finished:
                self.note_finished(number, self._finished[number])

    def note_finished(self, number: int, blob: Finished) -> None:
        """Note a blob that was made, so that a later import finds it. Raises: StorageError."""
        with self._mutex:
            self._finished[number] = blob
            files = [self._files[path] for path in self._extents.get(number, ())]
            is_verified = all(file.is_verified for file in files)
            key = self._keys[number] if is_verified else self._unverified_key(number, self._number)
            self._session.note(key, blob)
            for file in files:
                self._go_on(file)

    def _go_on(self, one: _File) -> None:
        """Note the last state before which all bytes belong to finished blobs."""
        while one.unfinished and one.unfinished[-1][1] in self._finished:
            one.unfinished.pop()
        until = one.unfinished[-1][0] if one.unfinished else one.file.size
        while one.passed and one.passed[0].offset <= until:
            one.state, one.is_noted = one.passed.popleft(), False
        if time.monotonic() - self._noted_at >= STATES_EVERY_S:
            self.note_states()

    def note_states(self) -> None:
        """Note how far the files were hashed. Raises: StorageError."""
        with self._mutex:
            for file in self._files.values():
                if not file.is_noted:
                    self._note(file)
            self._noted_at = time.monotonic()

    def _note(self, one: _File) -> None:
        if self._session.remembers:
            self._session.note(_key_of(one.file), self._session.put(one.state.encode()))
            one.is_noted = True

    def _unverified_key(self, number: int, noted_by: bytes) -> str:
        return _key("unverified", noted_by.hex(), self._keys[number])


def _extents(blob: PlannedBlob) -> dict[str, tuple[int, int]]:
    """Return where a blob's bytes begin and end in each file that has a declared digest."""
    extents: dict[str, tuple[int, int]] = {}
    for part in blob.parts:
        if part.file.declared is not None and part.nbytes:
            begin, end = part.offset, part.offset + part.nbytes
            first, last = extents.get(part.file.path, (begin, end))
            extents[part.file.path] = (min(begin, first), max(end, last))
    return extents


def _key_of(file: SourceFile) -> str:
    return _key("hash", file.identity.key, file.path, str(file.declared))


def _key(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode(errors="surrogateescape")).hexdigest()


WINDOW = 16
"""Blobs that are made at once: as many as the widest processors hash at once."""
_WINDOW_BYTES = 2**30
# Fewer blobs are made at once when they are that large: a killed import loses those it began.
_LEAST_WINDOW = 4
# Runs of a blob that follow each other where they are made of the same band (weights.py).
_TURN = 8
SMALL = 2**16
"""Bytes of a blob that is made, hashed and written together with others."""
# Of a small blob in its buffer: a line of the processor's cache.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Work:
    """What one thread makes in one buffer: a run of a large blob, or several small blobs.

    ``runs``: with the numbers of their blobs in the plan. ``using``: what the thread reads the
    source within. ``waits``: earlier work makes all bytes of the blob before the run, so its buffer
    may wait until these are hashed.
    """

    runs: tuple[tuple[int, Run], ...]
    is_small: bool = False
    using: AbstractContextManager[None] = field(default_factory=nullcontext)
    waits: bool = True


def room_of(small: tuple[int, Run]) -> int:
    """Return the bytes that a small blob takes in a buffer."""
    return small[1].end + -small[1].end % _ALIGNMENT


def schedule(blobs: Mapping[int, PlannedBlob], sizes: Sequence[int]) -> Iterator[Work]:
    """Yield the work of making ``blobs``, by number: the small ones, then the others.

    Of the large blobs that are made at once, it is a run, or some runs, of each in turn.
    """
    small = ((number, blobs[number]) for number in blobs if sizes[number] <= SMALL)
    small_runs = ((number, run) for number, blob in small for run in runs_of(blob))
    for group in batches(small_runs, room_of, RUN):
        yield Work(tuple(group), is_small=True)
    left = deque(number for number in blobs if sizes[number] > SMALL)
    window: deque[tuple[int, Iterator[Run]]] = deque()
    nbytes = 0
    while left or window:
        while left and len(window) < (WINDOW if nbytes < _WINDOW_BYTES else _LEAST_WINDOW):
            nbytes += sizes[left[0]]
            window.append((left[0], runs_of(blobs[left.popleft()])))
        number, runs = window.popleft()
        by_columns = any(source.by_columns for source in blobs[number].sources)
        turn = list(islice(runs, _TURN if by_columns else 1))
        if turn:
            yield from (Work(((number, run),)) for run in turn)
            window.append((number, runs))
        else:
            nbytes -= sizes[number]


class SpilledBytes:
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


class FarWork:
    """What is made of ``segments``: the work of ``blobs``, by number, that are not made yet.

    Segments are fetched in their order, as many ahead as have ``buffers``.
    """

    def __init__(
        self,
        blobs: Mapping[int, PlannedBlob],
        sizes: Sequence[int],
        segments: Segments,
        fetcher: Fetcher,
        buffers: BufferPool,
        declared: DeclaredFiles,
        stage: HashStage,
    ) -> None:
        self._blobs = blobs
        self._sizes = sizes
        self._segments = segments
        self._left = deque(segments.all)
        self._fetcher = fetcher
        self._buffers = buffers
        self._pool = ThreadPoolExecutor(fetcher.at_once, "fetch")
        self._requests: deque[Future[LoadedSegment]] = deque()
        self._declared = declared
        self._stage = stage
        self._loaded = LoadedBytes(_not_loaded)
        self.readers = SourceReaders(partial(LoadedFile, loaded=self._loaded))
        self._opens: dict[int, list[int]] = defaultdict(list)
        for number, blob in blobs.items():
            groups = (segments.numbers(whole(part)) for part in blob.parts)
            first = min((numbers[0] for numbers in groups if numbers), default=-1)
            self._opens[first].append(number)
        self._pending: dict[int, list[tuple[int, Run]]] = defaultdict(list)
        self._spilled: dict[int, SpilledBytes] = {}
        self._ends: defaultdict[int, int] = defaultdict(int)
        """Where the runs of each blob end that follow each other, of those yielded so far."""

    def works(self, stopped: threading.Event) -> Iterator[Work]:
        """Yield the work, each as soon as its segments have come, until ``stopped`` is set.

        Raises: as `Fetcher.fill`; DigestMismatchError; StorageError.
        """
        self._open(-1)
        yield from self._work_of(-1, None)
        for segment in self._segments.all:
            loaded = self._next(stopped)
            if loaded is None:
                return
            loaded.buffer.use()
            self._declared.add(segment, loaded.data, loaded.buffer.release)
            self._open(segment.number)
            for spilled in self._spilled.values():
                spilled.add(loaded)
            yield from self._work_of(segment.number, loaded)
            loaded.buffer.release()
            self._spilled = {
                n: spilled for n, spilled in self._spilled.items() if spilled.last > segment.number
            }

    def _next(self, stopped: threading.Event) -> LoadedSegment | None:
        """Return a segment when it has come; None after an error. Hash meanwhile."""
        wait_s = 0.0
        while not stopped.is_set():
            while self._left:
                buffer = self._buffers.take(0 if self._requests else wait_s)
                if buffer is None:
                    break
                self._requests.append(self._pool.submit(self._fetch, self._left.popleft(), buffer))
            if wait(list(self._requests)[:1], wait_s).done:
                return self._requests.popleft().result()
            wait_s = 0.0 if self._stage.work() else WAIT_S
        return None

    def _fetch(self, segment: Segment, buffer: Buffer) -> LoadedSegment:
        data = buffer.at(segment.begin, segment.nbytes)
        self._fetcher.fill(segment.file, segment.begin, data)
        return LoadedSegment(segment, data, buffer)

    def close(self) -> None:
        self._fetcher.stop.set()
        self._pool.shutdown(cancel_futures=True)

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
                    for segment in (
                        self._segments.all[number] for number in numbers if number < last
                    ):
                        span = max(need.begin, segment.begin), min(need.end, segment.end)
                        early[segment.number].append(span)
            if early:
                spans = {one: merge_spans(several) for one, several in early.items()}
                self._spilled[number] = SpilledBytes(spans, until)

    def _work_of(self, segment: int, loaded: LoadedSegment | None) -> Iterator[Work]:
        small = []
        for number, run in self._pending.pop(segment, ()):
            is_small = self._sizes[number] <= SMALL
            if is_small and number not in self._spilled:
                small.append((number, run))
                continue
            using = self._using(loaded, self._spilled.get(number))
            waits = run.begin == self._ends[number]
            if waits:
                self._ends[number] = run.end + run.gap
            yield Work(((number, run),), is_small, using, waits)
        for group in batches(small, room_of, RUN):
            yield Work(tuple(group), is_small=True, using=self._using(loaded, None))

    def _using(
        self, loaded: LoadedSegment | None, spilled: SpilledBytes | None
    ) -> AbstractContextManager[None]:
        if loaded is None:
            return nullcontext()
        loaded.buffer.use()
        return self._reading(loaded, {} if spilled is None else spilled.parts)

    @contextmanager
    def _reading(self, loaded: LoadedSegment, spilled: Parts) -> Iterator[None]:
        segment = loaded.segment
        with self._loaded.using({segment.file.path: [(segment.begin, loaded.data)]}, spilled):
            yield
        loaded.buffer.release()


def _not_loaded(file: SourceFile, begin: int, _buffer: memoryview) -> None:
    raise AssertionError(f"byte {begin:,} of {file.path} was not needed")
