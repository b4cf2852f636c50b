"""The stage of a job in which its threads hash: several blobs at once.

Threads give the pieces of blobs to the stage as they are made, in any order. Pieces of one blob are
hashed one after the other, but those of different blobs together, as many as the processor hashes
at once (`blobstore.hashing.width`). No thread of its own does that: a thread hashes when enough
blobs have a piece, or when it has nothing else to do (`HashStage.work`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from blobstore import hashing
from blobstore.hashing import Bytes, Stream

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a blob.

    ``read`` returns them, just before they are hashed. ``hashed`` is called when they are needed no
    more. ``passed`` is called before that with the stream, whose last bytes they are then.
    """

    nbytes: int
    read: Callable[[], Bytes]
    hashed: Callable[[], None] = lambda: None
    passed: Callable[[Stream], None] | None = None


class BlobHash:
    """The hash of a blob of ``size`` bytes, whose pieces come in any order.

    ``finished`` is called with its digest, 32 bytes, in the thread that hashes its last piece.
    ``continued``: an earlier stream, and how many bytes it has hashed.
    """

    def __init__(
        self,
        stage: HashStage,
        size: int,
        finished: Callable[[bytes], None],
        continued: tuple[Stream, int] | None = None,
    ) -> None:
        self.finished = finished
        self.stream, self.done = continued or (hashing.stream(), 0)
        self._stage = stage
        self._size = size
        self.waiting: dict[int, Piece] = {}
        self._is_taken = self._is_abandoned = False
        self._error: BaseException | None = None

    def add(self, offset: int, piece: Piece) -> None:
        """Add the piece at ``offset`` of the blob; it is hashed after all bytes before it."""
        with self._stage.mutex:
            self.waiting[offset] = piece
            self._offer()
        if self._is_abandoned:
            self.abandon()

    def abandon(self) -> None:
        """Drop all pieces that wait, and those that are still added: the blob has failed."""
        with self._stage.mutex:
            self._is_abandoned = True
            dropped, self.waiting = self.waiting, {}
        for piece in dropped.values():
            piece.hashed()

    def attempt(self, do: Callable[[], _T]) -> _T | None:
        """Return what ``do`` returns. If it fails, abandon the blob and return None."""
        try:
            return do()
        except BaseException as error:  # noqa: BLE001  # `check` raises it
            self._error = error
            self.abandon()
            return None

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _offer(self) -> None:
        if self.done in self.waiting and not self._is_taken:
            self._is_taken = True
            self._stage.ready.append(self)

    def advance(self, nbytes: int) -> bool:
        """Note that ``nbytes`` more are hashed; return True if these were the last ones.

        The stage's mutex is held.
        """
        self.done += nbytes
        self._is_taken = False
        self._offer()
        return self.done == self._size


class HashStage:
    """Where the threads of one job hash. Safe to share between them."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.ready: deque[BlobHash] = deque()
        self._width = hashing.width()

    @property
    def is_full(self) -> bool:
        return len(self.ready) >= self._width

    def work(self) -> bool:
        """Hash a piece of each blob that has one, up to `hashing.width`; return False if none has.

        Raises: the first error of reading a piece, or of ``finished``; its blob is abandoned.
        """
        with self.mutex:
            blobs = [self.ready.popleft() for _ in range(min(self._width, len(self.ready)))]
            # None: the blob was abandoned.
            taken = [
                (blob, piece) for blob in blobs if (piece := blob.waiting.pop(blob.done, None))
            ]
        try:
            self._hash(taken)
        finally:
            for _, piece in taken:
                piece.hashed()
        return bool(blobs)

    def _hash(self, taken: Sequence[tuple[BlobHash, Piece]]) -> None:
        data = {blob: raw for blob, piece in taken if (raw := blob.attempt(piece.read)) is not None}
        hashing.update_all([blob.stream for blob in data], list(data.values()))
        for blob, piece in taken:
            if piece.passed is not None and blob in data:
                blob.attempt(partial(piece.passed, blob.stream))
        with self.mutex:
            complete = [
                blob for blob, piece in taken if blob in data and blob.advance(piece.nbytes)
            ]
        for blob in complete:
            blob.attempt(partial(blob.finished, blob.stream.digest()))
        for blob, _ in taken:
            blob.check()

    def work_while(self, condition: Callable[[], bool]) -> None:
        """Hash as long as the condition holds and a blob has a piece. Raises: as `work`."""
        while condition() and self.work():
            pass

    def digest(self, size: int, pieces: Iterable[memoryview]) -> bytes:
        """Return the digest of ``size`` bytes, 32 bytes.

        The pieces are hashed together with those that other threads have at the same time. Each is
        hashed when the next is requested.
        """
        digests: list[bytes] = []
        blob, hashed = BlobHash(self, size, digests.append), threading.Event()
        offset = 0
        for piece in pieces:
            hashed.clear()
            blob.add(offset, Piece(len(piece), piece.toreadonly, hashed.set))
            self.work_while(lambda: not hashed.is_set())
            hashed.wait()
            offset += len(piece)
        return digests[0] if digests else blob.stream.digest()
