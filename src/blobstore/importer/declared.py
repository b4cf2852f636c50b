"""Declared digests: files that are hashed as they pass, and blobs that wait for the result.

A server may declare the digest of a file. It is that of all bytes, so it is known at the end of the
file only. A blob that is made of such files is *unverified* until then: no later import finds it by
its key. An import that is killed goes on in the middle of a file: it has noted its unverified
blobs, and the state of the file's hash at an offset before which all bytes belong to finished
blobs. The next import hashes the file from there. What was made of later bytes is made again, so no
byte becomes a model that the digest does not cover.

The notes of one import belong together, by a number that is drawn for it: of two imports at the
same time, one might have fetched other bytes.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from blobstore.errors import DigestMismatchError
from blobstore.hashing import Sha256, Stream
from blobstore.hashing.stage import BlobHash, HashStage, Piece
from blobstore.importer.outputs import PlannedBlob
from blobstore.importer.segments import Segment
from blobstore.source.folders import SourceFile
from blobstore.store.ports import Finished, Session

_PIECE: Final = 2**20
_BEHIND: Final = 2 * 2**20
"""Bytes that may wait to be hashed before threads that make blobs hash them first."""
_STATE_NBYTES: Final = 128
STATES_EVERY_S = 1.0
"""A killed import hashes what was hashed since then again, and makes its blobs again."""


class _State(NamedTuple):
    """The state of a file's hash at an offset, of the import of that number."""

    offset: int
    stream: bytes
    number: bytes

    def encode(self) -> bytes:
        """Return a small blob of always the same size, because blobs are found by key and size."""
        head = self.offset.to_bytes(8, "big") + self.number + len(self.stream).to_bytes(1, "big")
        return (head + self.stream).ljust(_STATE_NBYTES, b"\0")

    @classmethod
    def decode(cls, raw: bytes) -> _State:
        return cls(int.from_bytes(raw[:8], "big"), raw[25 : 25 + raw[24]], raw[8:24])


@dataclass(slots=True)
class _File:
    """A file that is hashed.

    ``unfinished``: where the bytes of its blobs begin, and their numbers; the first one is last.
    ``state``: the last one that may be noted; ``passed``: those at the ends of later segments.
    """

    file: SourceFile
    hash: BlobHash
    state: _State | None
    unfinished: list[tuple[int, int]]
    passed: deque[_State] = field(default_factory=deque)
    is_noted: bool = False
    is_verified: bool = False


class DeclaredFiles:
    """The files with a declared digest that ``blobs`` are made from, by number.

    ``keys``: of all blobs of the plan. Safe to share between threads.
    """

    def __init__(
        self,
        blobs: Mapping[int, PlannedBlob],
        keys: Sequence[str],
        session: Session,
        stage: HashStage,
    ) -> None:
        self._blobs = blobs
        self._keys = keys
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
        return {
            path: one.state.offset if one.state is not None else 0
            for path, one in self._files.items()
        }

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
            for number in self._extents
            for source in self._blobs[number].sources
            for part in source.parts.values()
            if part.file.path in self._extents[number]
        }
        states = {path: state for path, file in files.items() if (state := self._noted_state(file))}
        found = self._find(states, verify=verify)
        if found is None:
            states, found = {}, {}
        for path, file in files.items():
            self._files[path] = self._opened(file, states.get(path))
        for number, blob in found.items():
            self.finished(number, blob)
        for one in self._files.values():
            if one.state is not None:
                one.state = one.state._replace(number=self._number)
                self._note(one)
                if one.state.offset == one.file.size:
                    self._end(one, one.hash.stream)
        return found

    def _noted_state(self, file: SourceFile) -> _State | None:
        blob = self._session.recall(_key_of(file), _STATE_NBYTES, verify=True)
        if blob is None:
            return None
        with self._session.open(blob) as reader:
            state = _State.decode(reader.read(0, _STATE_NBYTES))
        return state if state.offset else None  # see `_end`

    def _find(self, states: Mapping[str, _State], *, verify: bool) -> dict[int, Finished] | None:
        """Return the blobs that an import made of the bytes before its files' states.

        None if the states are of no use: they are those of several imports, or a blob that begins
        before one has to be made.
        """
        numbers = {state.number for state in states.values()}
        if len(numbers) != 1:
            return None
        (noted_by,) = numbers
        found = {}
        for number, extents in self._extents.items():
            offsets = {path: states[path].offset if path in states else 0 for path in extents}
            blob = None
            if all(end <= offsets[path] for path, (_, end) in extents.items()):
                key = self._unverified_key(number, noted_by)
                blob = self._session.recall(key, self._blobs[number].size, verify=verify)
            if blob is not None:
                found[number] = blob
            elif any(begin < offsets[path] for path, (begin, _) in extents.items()):
                return None
        return found

    def _opened(self, file: SourceFile, state: _State | None) -> _File:
        begun = (Sha256(), 0) if state is None else (Sha256.resumed(state.stream), state.offset)
        unfinished = [
            (extents[file.path][0], number)
            for number, extents in self._extents.items()
            if file.path in extents
        ]
        unfinished.sort(reverse=True)
        return _File(file, self._stage.blob(file.size, _nothing, begun), state, unfinished)

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
            piece = Piece(len(part), partial(_itself, part))
            if begin + _PIECE >= segment.nbytes:
                passed = partial(self._passed, one, segment)
                piece = Piece(len(part), piece.read, hashed, passed)
            one.hash.add(segment.begin + begin, piece)

    def _passed(self, one: _File, segment: Segment, stream: Stream) -> None:
        with self._mutex:
            self._behind -= segment.nbytes
            if isinstance(stream, Sha256):  # it is: see `_opened`
                one.passed.append(_State(segment.end, stream.state(), self._number))
            self._go_on(one)
            if segment.end == one.file.size:
                self._end(one, stream)

    def _end(self, one: _File, stream: Stream) -> None:
        """Let the blobs of a file be found that has its declared digest."""
        file = one.file
        if file.declared is None or stream.digest().hex() != file.declared.hex:
            one.state = _State(0, b"", self._number)
            self._note(one)  # the next import must not go on with it
            message = f"{file.path}: its bytes are not those of {file.declared}, which its server"
            raise DigestMismatchError(f"{message} declares", path=file.path)
        one.is_verified = True
        for number, extents in self._extents.items():
            if file.path in extents and number in self._finished:
                self.finished(number, self._finished[number])

    def finished(self, number: int, blob: Finished) -> None:
        """Note a blob that was made, so that a later import finds it. Raises: StorageError."""
        with self._mutex:
            self._finished[number] = blob
            files = [self._files[path] for path in self._extents.get(number, ())]
            is_verified = all(one.is_verified for one in files)
            key = self._keys[number]
            key = key if is_verified else self._unverified_key(number, self._number)
            self._session.note(key, blob)
            for one in files:
                self._go_on(one)

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
            for one in self._files.values():
                if one.state is not None and not one.is_noted:
                    self._note(one)
            self._noted_at = time.monotonic()

    def _note(self, one: _File) -> None:
        if self._session.remembers and one.state is not None:
            state = self._session.put(one.state.encode())
            self._session.note(_key_of(one.file), state)
            one.is_noted = True

    def _unverified_key(self, number: int, noted_by: bytes) -> str:
        return _key("unverified", noted_by.hex(), self._keys[number])


def _extents(blob: PlannedBlob) -> dict[str, tuple[int, int]]:
    """Return where a blob's bytes begin and end in each file that has a declared digest."""
    found: dict[str, tuple[int, int]] = {}
    for source in blob.sources:
        for part in source.parts.values():
            if part.file.declared is not None and part.nbytes:
                begin, end = part.offset, part.offset + part.nbytes
                first, last = found.get(part.file.path, (begin, end))
                found[part.file.path] = (min(begin, first), max(end, last))
    return found


def _key_of(file: SourceFile) -> str:
    return _key("hash", file.identity.key, file.path, str(file.declared))


def _key(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode(errors="surrogateescape")).hexdigest()


def _nothing(_digest: bytes) -> None:
    pass


def _itself(data: memoryview) -> memoryview:
    return data
