"""Write: carry an import plan out. Nothing is decided here.

Threads take pieces of work in one order (schedule.py), each with a buffer of its own. A run of a
large blob is read, decoded, cast and quantized into the buffer, written to its place, and given to
the hash stage, where several blobs are hashed at once. Small blobs are made, hashed and written
many in one buffer. So all threads work on one large tensor as well as on many small ones, memory
is that of the buffers, and the bytes do not depend on the number of threads.

What an earlier session has made is not made again: its key is a hash of everything that a planned
blob's bytes depend on. Files of the source that are kept become blobs byte for byte.

The buffers are taken once and given back. How many there are bounds an import's memory. A thread
that finds none free hashes, which frees some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from blobstore.errors import BlobStoreError, StorageError
from blobstore.hashing.stage import HashStage
from blobstore.importer.buffers import SPARE_THREADS, Buffer, BufferPool, SpareMemory
from blobstore.importer.keys import entry_keys
from blobstore.importer.making import CHUNK, RUN, Run, RunMaker
from blobstore.importer.planning.outputs import ImportPlan, PlannedBlob, PlannedCopy
from blobstore.importer.recalling import WrittenBlobs, recall
from blobstore.importer.schedule import (
    WINDOW,
    FirstError,
    RunOfBlob,
    SmallBlobs,
    Work,
    is_large,
    room_of,
    schedule,
)
from blobstore.importer.streaming.pieces import files_of
from blobstore.importer.streaming.span_sums import SourceChecks
from blobstore.importer.streaming.stream import write_streamed
from blobstore.io.budget import allow_open_files
from blobstore.io.durable import PAGE, os_errors
from blobstore.io.workers import Progress, each
from blobstore.source.fetching import FetchOptions
from blobstore.source.weights import SourceReaders
from blobstore.store.ports import Finished, Session, Writer


def copy_file(layer: PlannedCopy, session: Session) -> Finished:
    """Return the blob of a file, written to ``session``; it is not yet visible.

    Raises: CorruptDataError when the file is not the one any more that was planned, or changes
    meanwhile; DigestMismatchError when its bytes do not have the hash that its server declares;
    NotFoundError; StorageError.
    """
    with layer.file.open() as reader:
        blob = session.copy(reader)
        reader.check_unchanged()
    layer.file.check(blob.digest, reader.git)
    return blob


_BUFFERS_A_THREAD = 4
_SCRATCH = 4
"""Chunks that a thread needs besides its buffer: values read, decoded and cast, and scales."""


def least_memory(jobs: int) -> int:
    """Return the bytes that ``jobs`` threads work in at least: without spare ones."""
    return jobs * (RUN + _SCRATCH * CHUNK)


def usual_memory(jobs: int) -> int:
    """Return the bytes that ``jobs`` threads work in when nothing else is said."""
    threads = jobs + SPARE_THREADS
    return threads * (_BUFFERS_A_THREAD * RUN + _SCRATCH * CHUNK) + WINDOW * RUN


def write_blobs(
    plan: ImportPlan,
    session: Session,
    jobs: int,
    memory: int,
    progress: Progress,
    *,
    verify_reuse: bool,
    fetch: FetchOptions | None = None,
    checks: SourceChecks | None = None,
    spare: SpareMemory | None = None,
    taken: Callable[[], None] = lambda: None,
) -> WrittenBlobs:
    """Write the plan's tensor blobs with ``jobs`` threads in ``memory`` bytes.

    They are not yet visible. ``fetch``: how a source on a server is streamed (streaming/).
    ``checks``: of its files that have a declared digest (None: they are hashed whole).
    ``spare``: memory that calls share which follow each other. ``taken`` is called as soon as a
    thread has taken the last work: the next call may begin. Neither is for streamed sources.

    A blob that an earlier import of the same bytes has made is not made again; with
    ``verify_reuse`` only when its bytes are its digest's.

    Raises: the error that comes first in the plan, whatever the number of threads: it names the
    tensor or the file; StorageError. Nothing is committed here.
    """
    if any(file.folder.is_remote for file in files_of(plan).values()):
        return write_streamed(
            plan,
            session,
            jobs,
            memory,
            progress,
            verify_reuse=verify_reuse,
            fetch=fetch,
            checks=checks,
        )
    allow_open_files(
        sum(len(inventory.files) for inventory in plan.inventories) + 3 * jobs * WINDOW
    )
    making = _Making(plan, session, progress, spare, taken)
    try:
        making.recall(jobs, verify=verify_reuse)
        making.make_all(jobs, memory)
        return making.result()
    finally:
        making.close()


def _buffers(threads: int, runs: int, memory: int, nbytes: int, spare: SpareMemory) -> BufferPool:
    """Return as many buffers as are of use and fit the memory.

    Raises: StorageError when there is not so much memory.
    """
    fit = (memory - threads * _SCRATCH * CHUNK) // RUN
    count = max(threads, min(threads + runs, fit))
    with os_errors("take", f"{count * nbytes:,} bytes of memory"):
        return BufferPool(count, nbytes, spare, memory)


class _Making:
    """What the threads of one import share."""

    def __init__(
        self,
        plan: ImportPlan,
        session: Session,
        progress: Progress,
        spare: SpareMemory | None,
        taken: Callable[[], None],
    ) -> None:
        self._blobs = plan.blobs
        self._keys = list(entry_keys(plan.blobs))
        self._session = session
        self._progress = progress
        self._spare = spare or SpareMemory()
        self._is_shared = spare is not None
        self._taken = taken
        self._readers = SourceReaders(spare=self._spare.scratch)
        self._maker = RunMaker(self._readers)
        self._stage = HashStage()
        self._buffers: BufferPool | None = None
        self._first_error = FirstError()
        self._finished: dict[int, Finished] = {}
        self._recalled = 0
        self._writers: dict[int, Writer] = {}

    def recall(self, jobs: int, *, verify: bool) -> None:
        """Find the blobs that an earlier import has made."""
        found = recall(self._blobs, self._keys, self._session, jobs, self._progress, verify=verify)
        self._finished.update(found)
        self._recalled = len(found)

    def make_all(self, jobs: int, memory: int) -> None:
        """Make the blobs that no earlier import has made."""
        to_make = {n: blob for n, blob in enumerate(self._blobs) if n not in self._finished}
        sizes = [(blob.size, blob.source_bytes) for blob in to_make.values()]
        runs = sum([2 + 2 * max(size, read) // RUN for size, read in sizes if is_large(size)])
        # More threads than runs would have nothing to do. Small blobs are work for one thread:
        # several would take turns with Python's lock.
        threads = max(1, min(jobs + SPARE_THREADS, runs, memory // least_memory(1)))
        needed = sum([size + PAGE for size, _ in sizes])
        largest = RUN if self._is_shared else min(RUN, needed)
        self._buffers = buffers = _buffers(threads, runs, memory, largest, self._spare)

        def make(item: tuple[Work, Buffer]) -> None:
            self._make(*item)
            self._stage.work_while(lambda: self._stage.is_full or buffers.is_empty)

        each(self._with_buffers(to_make, buffers), make, threads, name="import")
        self._first_error.check()
        each(range(threads), lambda _: self._stage.work_while(lambda: True), threads, name="hash")

    def _with_buffers(
        self, to_make: Mapping[int, PlannedBlob], buffers: BufferPool
    ) -> Iterator[tuple[Work, Buffer]]:
        """Yield all work, each with a buffer.

        The buffer comes with the work: a run that is begun must be able to end, since later ones
        wait to be hashed behind it.
        """
        for work in schedule(to_make, self._first_error):
            if isinstance(work, RunOfBlob) and work.number not in self._writers:
                self._writers[work.number] = self._writer(work.number)
            yield work, buffers.take()
        self._taken()

    def _writer(self, number: int) -> Writer:
        def finish(blob: Finished) -> None:
            self._finish(number, blob)
            del self._writers[number]

        return self._session.writer(self._blobs[number].size, finish, self._stage)

    def _make(self, work: Work, buffer: Buffer) -> None:
        """Make one work, or note why it can't be made.

        After an error its blob's buffers are free, because the thread of the next work waits for
        one. Errors of the store end the import at once.
        """
        try:
            match work:
                case RunOfBlob(number, run):
                    self._make_run(number, run, buffer)
                case SmallBlobs(blobs):
                    self._make_small(blobs, buffer)
        except BaseException as error:
            if isinstance(work, RunOfBlob) and (writer := self._writers.get(work.number)):
                writer.release()
            buffer.release()
            if not isinstance(error, BlobStoreError) or isinstance(error, StorageError):
                raise
            self._first_error.note(work.place, error)

    def _make_run(self, number: int, run: Run, buffer: Buffer) -> None:
        blob, writer = self._blobs[number], self._writers[number]
        data = buffer.at(run.begin, run.end - run.begin)
        beside = self._maker.make(run, data, blob.options)
        writer.put(run.begin, data, beside=beside, gap=run.gap, aligned=True, hashed=buffer.release)
        self._progress(run.source_bytes, blob.name)

    def _make_small(self, blobs: Sequence[tuple[int, Run]], buffer: Buffer) -> None:
        made = []
        begin = 0
        for number, run in blobs:
            made.append(buffer.part(begin, run.end))
            self._maker.make(run, made[-1], self._blobs[number].options)
            begin += room_of(run)
        for (number, run), blob in zip(blobs, self._session.put_all(made), strict=True):
            self._finish(number, blob)
            self._progress(run.source_bytes, self._blobs[number].name)
        buffer.release()

    def _finish(self, number: int, blob: Finished) -> None:
        self._finished[number] = blob
        if self._session.earlier is not None:
            self._session.earlier.note(self._keys[number], blob)

    def result(self) -> WrittenBlobs:
        """Return the blobs. Raises: CorruptDataError when a source changed meanwhile."""
        self._readers.check_unchanged()
        return WrittenBlobs(
            [self._finished[number] for number in range(len(self._blobs))], self._recalled
        )

    def close(self) -> None:
        """Close all files, and free the buffers."""
        for writer in list(self._writers.values()):
            writer.close()
        self._readers.close()
        if self._buffers is not None:
            self._buffers.close()
