"""The blobs of a streamed import while they are written, and the part that survives a kill.

A blob may be used when it is whole and *trusted*: when all that it was made from is done, and the
files with a declared digest were hashed to their end. Only then is it a finished blob of the
session, and noted for later imports of the source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blobstore import hashing
from blobstore.hashing.stage import HashStage
from blobstore.importer.buffers import Buffer
from blobstore.importer.making import Run
from blobstore.importer.planning.outputs import PlannedBlob
from blobstore.importer.streaming.resuming import BlobBegun, begun_path
from blobstore.importer.streaming.worklog import PieceSum, WorkLog
from blobstore.kernels.arrays import Array
from blobstore.names import Digest
from blobstore.store.ports import ContinuedWriter, Finished, Session, Unfinished, Writer


@dataclass(frozen=True, slots=True)
class KeptWork:
    """Where the work of an import is kept if it is killed: its folder, its log, and the port."""

    folder: Path
    log: WorkLog
    unfinished: Unfinished


class StreamedBlobs:
    """The blobs that are written, by number. Safe to share between threads.

    ``keys``: of all blobs of the plan; None for one that later sessions find by its digest only.
    ``work``: None if nothing is kept.
    """

    def __init__(
        self,
        blobs: Sequence[PlannedBlob],
        keys: Sequence[str | None],
        session: Session,
        stage: HashStage,
        work: KeptWork | None,
    ) -> None:
        self.finished: dict[int, Finished] = {}
        self._blobs = blobs
        self._keys = keys
        self._session = session
        self._stage = stage
        self._work = work
        self._writers: dict[int, Writer] = {}
        self._whole: dict[int, Callable[[], Finished]] = {}
        self._trusted: set[int] = set()
        self._mutex = threading.Lock()

    def put(
        self,
        number: int,
        run: Run,
        data: memoryview,
        beside: Sequence[tuple[int, Array]],
        to: Buffer,
        *,
        since: int,
    ) -> PieceSum:
        """Write a run of a blob, made in the buffer ``to``, which is released when it can be.

        ``beside``: what belongs behind the run. ``since``: the bytes between it and the run are
        written now, too. Returns what the log says of it. Raises:
        StorageError.
        """
        writer = self._writer(number)
        # Before it is written: then the buffer may be released.
        crc = hashing.crc32([data, *(array.data for _, array in beside)])
        places = tuple((offset, array.nbytes) for offset, array in beside)
        writer.put(
            run.begin,
            data,
            beside=beside,
            gap=run.gap,
            aligned=True,
            since=since,
            hashed=to.release,
        )
        return PieceSum(number, run.begin, run.end, crc, places)

    def put_small(self, numbers: Sequence[int], data: Sequence[memoryview]) -> list[Digest]:
        """Write whole small blobs. Raises: StorageError."""
        made = self._session.put_all(data)
        for number, blob in zip(numbers, made, strict=True):
            self._note_whole(number, partial(_itself, blob))
        return [blob.digest for blob in made]

    def resume(self, begun: BlobBegun, *, is_trusted: bool) -> None:
        """Go on with a blob of a killed import. Raises: StorageError."""
        if is_trusted:
            self.trust([begun.number])
        if begun.finished is not None:
            self._note_whole(begun.number, partial(_itself, begun.finished))
        elif begun.made:
            writer = self._continued(begun.number)
            for piece in begun.made:
                writer.have(piece.run.begin, piece.run.end + piece.run.gap - piece.run.begin)

    def trust(self, numbers: Iterable[int]) -> None:
        """Let blobs be used as soon as they are whole. Raises: StorageError."""
        with self._mutex:
            self._trusted.update(numbers)
            whole = {number: self._whole.pop(number) for number in numbers if number in self._whole}
        for number, accept in whole.items():
            self._accept(number, accept)

    def _note_whole(self, number: int, accept: Callable[[], Finished]) -> None:
        with self._mutex:
            if number not in self._trusted:
                self._whole[number] = accept
                return
        self._accept(number, accept)

    def _accept(self, number: int, accept: Callable[[], Finished]) -> None:
        blob = self.finished[number] = accept()
        if self._session.earlier is not None:
            self._session.earlier.note(self._keys[number] or blob.digest.hex, blob)

    def _writer(self, number: int) -> Writer:
        with self._mutex:
            writer = self._writers.get(number)
            if writer is None:
                writer = self._writers[number] = self._new_writer(number)
            return writer

    def _new_writer(self, number: int) -> Writer:
        if self._work is not None:
            return self._kept_writer(number, self._work)

        def whole(blob: Finished) -> None:
            self._forget_writer(number)
            self._note_whole(number, partial(_itself, blob))

        return self._session.writer(self._blobs[number].size, whole, self._stage)

    def _continued(self, number: int) -> ContinuedWriter:
        if self._work is None:
            raise AssertionError("only kept work can be continued")
        writer = self._writers[number] = self._kept_writer(number, self._work)
        return writer

    def _kept_writer(self, number: int, work: KeptWork) -> ContinuedWriter:
        path, size = begun_path(work.folder, number), self._blobs[number].size

        def accept(digest: Digest) -> Finished:
            work.log.accepting(number, digest)
            return work.unfinished.accept(path, digest, size)

        def whole(digest: Digest) -> None:
            self._forget_writer(number)
            taken = partial(accept, digest)
            if work.unfinished.accepts_early:
                taken = partial(_itself, taken())
            self._note_whole(number, taken)

        return work.unfinished.writer(path, size, whole, self._stage)

    def _forget_writer(self, number: int) -> None:
        with self._mutex:
            del self._writers[number]

    def close(self) -> None:
        """Close all files."""
        for writer in list(self._writers.values()):
            writer.close()


def _itself(blob: Finished) -> Finished:
    return blob
