"""Flow: segments from their arrival until everything of them is done, in their order.

A segment goes through three gates, each in the order of the segments: it has *arrived*; it was
*hashed*, if its file has a declared digest, so nothing is made of bytes that the hash does not
cover; all of its pieces are *done*, which the log says then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Set as AbstractSet
from dataclasses import dataclass, field

from blobstore.errors import DigestMismatchError
from blobstore.hashing import Sha256, Stream
from blobstore.hashing.stage import BlobHash, HashStage, Piece
from blobstore.importer.buffers import Buffer
from blobstore.importer.streaming.agenda import Arrival
from blobstore.importer.streaming.held import HeldSum
from blobstore.importer.streaming.ring import RingPart
from blobstore.importer.streaming.segments import SourceSegment
from blobstore.importer.streaming.worklog import PieceSum, SegmentDone, SpanSum
from blobstore.names import Digest
from blobstore.source.weights import SourceFile

_AGAIN_S = 0.05
"""How long a thread waits before it asks again whether it is of use."""


@dataclass(slots=True, eq=False)
class Loaded:
    """A segment in memory, and its progress. ``left``: tasks that are not done."""

    arrival: Arrival
    part: RingPart
    state: bytes | None = None
    left: int = 0
    pieces: list[PieceSum] = field(default_factory=list)
    small: list[tuple[int, Digest]] = field(default_factory=list)
    held: tuple[HeldSum, ...] = ()
    sums: tuple[SpanSum, ...] = ()

    @property
    def number(self) -> int:
        """The segment's number."""
        return self.arrival.number

    def done(self) -> SegmentDone:
        """Return what the log says of it."""
        pieces = tuple(sorted(self.pieces, key=lambda one: (one.number, one.begin)))
        small = tuple(self.small)
        return SegmentDone(self.number, self.state, pieces, self.held, small, self.sums)


class Gate:
    """Lets segments through in their order: ``then`` is called with each, one at a time."""

    def __init__(self, then: Callable[[Loaded], None]) -> None:
        self._then = then
        self._expected: deque[Loaded] = deque()
        self._ready: set[int] = set()
        self._mutex = threading.RLock()

    def expect(self, loaded: Loaded) -> None:
        """Note the segment that comes next."""
        with self._mutex:
            self._expected.append(loaded)

    def ready(self, loaded: Loaded) -> None:
        """Let a segment through, when those before it are through. Raises: as ``then``."""
        with self._mutex:
            self._ready.add(loaded.number)
            while self._expected and self._expected[0].number in self._ready:
                first = self._expected.popleft()
                self._ready.remove(first.number)
                self._then(first)

    @property
    def is_empty(self) -> bool:
        """True if all segments are through."""
        return not self._expected


class FileHashes:
    """The hashes of files, by the paths ``hashed``.

    ``states``: of the files of which a part was hashed before, by path, with the bytes of it.
    """

    def __init__(
        self, stage: HashStage, hashed: AbstractSet[str], states: dict[str, tuple[bytes, int]]
    ) -> None:
        self._hashed = hashed
        self._stage = stage
        self._states = states
        self._hashes: dict[str, BlobHash] = {}

    def add(self, loaded: Loaded, passed: Callable[[Loaded], None]) -> None:
        """Hash a segment, in the order of its file; then call ``passed``.

        `HashStage.work` raises DigestMismatchError, with ``path``, at the end of a file that has
        another digest.
        """
        segment = loaded.arrival.segment
        if segment.file.path not in self._hashed:
            passed(loaded)
            return

        def then(stream: Stream) -> None:
            if isinstance(stream, Sha256):  # it is: see `_hash_of`
                loaded.state = stream.state()
            if segment.ends_file:
                check_declared(segment.file, stream.digest())
            passed(loaded)

        data = loaded.part.data
        piece = Piece(segment.nbytes, lambda: data, passed=then)
        self._hash_of(segment).add(segment.begin, piece)

    def _hash_of(self, segment: SourceSegment) -> BlobHash:
        file = segment.file
        hashed = self._hashes.get(file.path)
        if hashed is None:
            state, nbytes = self._states.get(file.path, (None, 0))
            stream = Sha256() if state is None else Sha256.resumed(state)
            hashed = self._stage.blob(file.size, lambda _: None, (stream, nbytes))
            self._hashes[file.path] = hashed
        return hashed


def check_declared(file: SourceFile, raw_digest: bytes) -> None:
    """Raise DigestMismatchError unless a file has the digest that its server declares."""
    if file.declared is not None and raw_digest.hex() != file.declared.hex:
        message = f"{file.path}: its bytes are not those of {file.declared}, which its server"
        raise DigestMismatchError(f"{message} declares", path=file.path)


class Turns:
    """Lets as many threads fetch as are of use, which may change. Safe to share between threads.

    The others wait before they take a segment: they hold no memory, and do not take turns with
    the interpreter's lock. ``wanted`` says how many are of use.
    """

    def __init__(self, wanted: Callable[[], int]) -> None:
        self._wanted = wanted
        self._seen = 0
        self._changed = threading.Condition()
        self._is_over = False

    def wait(self, number: int) -> None:
        """Return when more than ``number`` threads are of use, or after `end`."""
        with self._changed:
            while number >= self._wanted() and not self._is_over:
                self._changed.wait(_AGAIN_S)  # more may be of use while all of those fetch

    def check(self) -> None:
        """Let threads go on that are of use now."""
        with self._changed:
            before, self._seen = self._seen, self._wanted()
            if self._seen > before:
                self._changed.notify_all()

    def end(self) -> None:
        """Let all threads go on: nothing is left to fetch."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


Order = tuple[int, int, int]
"""The place of a task among all: its segment, and the blob and offset that it is for."""


class Tasks:
    """What can be done now, in order. Safe to share between threads."""

    def __init__(self) -> None:
        self._tasks: deque[tuple[Order, Callable[[Buffer], None]]] = deque()
        self.changed = threading.Condition()
        self.is_stopped = False

    def add(self, order: Order, do: Callable[[Buffer], None]) -> None:
        """Add a task, which is done in a buffer: ``order`` is its place among all."""
        with self.changed:
            self._tasks.append((order, do))
            self.changed.notify()

    def take(self) -> tuple[Order, Callable[[Buffer], None]] | None:
        """Return the next task; None if no task waits, or after `stop`."""
        with self.changed:
            return self._tasks.popleft() if self._tasks and not self.is_stopped else None

    def wake(self) -> None:
        """Let a waiting thread check again whether there is something to do.

        One is enough: it goes on until nothing is left. All of them would take turns with the
        interpreter's lock.
        """
        with self.changed:
            self.changed.notify()

    def wake_all(self) -> None:
        """Let all waiting threads check whether everything is done."""
        with self.changed:
            self.changed.notify_all()

    def stop(self) -> None:
        """Let no other task be taken."""
        with self.changed:
            self.is_stopped = True
            self._tasks.clear()
            self.changed.notify_all()

    def __bool__(self) -> bool:
        return bool(self._tasks)
