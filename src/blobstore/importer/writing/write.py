"""Write: carry an import plan out. Nothing is decided here.

Threads take the runs of all blobs one after the other, each with a buffer of its own: source bytes are read, decoded, cast
and quantized into it, written to their place and hashed when everything before them is. So all threads work on one large
tensor as well as on many small ones, memory is that of the buffers, and the bytes do not depend on the number of threads.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from blobstore.importer.planning.outputs import ImportPlan, PlannedBlob
from blobstore.importer.writing.buffers import Buffer, BufferPool
from blobstore.importer.writing.making import RunMaker
from blobstore.importer.writing.reuse import entry_key
from blobstore.importer.writing.runs import CHUNK, Run, runs_of
from blobstore.ranges import allow_open_files
from blobstore.source.reading import SourceReaders
from blobstore.store import BlobWriter, FinishedBlob, Ingest
from blobstore.store.files import os_errors

_BUFFERS_A_THREAD = 4
_SCRATCH = 4
"""What a thread needs besides its buffer, in chunks: the values it reads, decodes and casts, and their scales."""
_SPARE_THREADS = 1
"""More threads than asked for, so that a core has work while a thread waits for the disk."""


class Progress(Protocol):
    """Told after every run: how many more source bytes are done, and of which blob or tensor. Called from any thread.

    Bytes that were not read because an earlier import had made their blobs are told first, all at once.
    """

    def __call__(self, nbytes: int, blob: str) -> None:
        """Take note of ``nbytes`` more source bytes."""


def least_memory(jobs: int) -> int:
    """Return the bytes that ``jobs`` threads work in at least."""
    return (jobs + _SPARE_THREADS) * (1 + _SCRATCH) * CHUNK


def usual_memory(jobs: int) -> int:
    """Return the bytes that ``jobs`` threads work in when nothing else is said."""
    return (jobs + _SPARE_THREADS) * (_BUFFERS_A_THREAD + _SCRATCH) * CHUNK


@dataclass(frozen=True, slots=True)
class WrittenBlobs:
    """The tensor blobs of a plan, in its order, each with the journal's key; and how many earlier imports had made."""

    blobs: list[FinishedBlob]
    keys: list[str]
    recalled: int


def write_blobs(
    plan: ImportPlan, ingest: Ingest, jobs: int, memory: int, progress: Progress, *, verify_reuse: bool
) -> WrittenBlobs:
    """Write the plan's tensor blobs with ``jobs`` threads in ``memory`` bytes; they are not yet visible.

    A blob that an earlier import of the same bytes has made is not made again; with ``verify_reuse`` only when its bytes
    are its digest's.

    Raises: the error of the first run in plan order that fails, whatever the number of threads: it names the tensor or
    the file; StorageError. Nothing is committed here.
    """
    allow_open_files(sum(len(inventory.files) for inventory in plan.inventories) + 2 * jobs)
    work = _Work(plan, ingest, progress)
    try:
        work.recall(jobs, verify=verify_reuse)
        runs = work.most_runs()
        threads = max(1, min(jobs + _SPARE_THREADS, runs))
        buffers = _buffers(threads, runs, memory, work.largest_run())
        with ThreadPoolExecutor(threads, thread_name_prefix="import") as pool:
            try:
                futures = [pool.submit(work.run, buffers) for _ in range(threads)]
                for future in futures:
                    future.result()
            except BaseException:
                work.fail(-1, None)
                raise
        return work.result()
    finally:
        work.close()


def _buffers(threads: int, runs: int, memory: int, nbytes: int) -> BufferPool:
    """Return as many buffers as are of use and fit the memory. Raises: StorageError when there is not so much memory."""
    count = max(threads, min(threads + runs, memory // CHUNK - threads * _SCRATCH))
    with os_errors("take", f"{count * nbytes:,} bytes of memory"):
        return BufferPool(count, nbytes)


class _Work:
    """What the threads of one import share."""

    def __init__(self, plan: ImportPlan, ingest: Ingest, progress: Progress) -> None:
        self._blobs = plan.blobs
        self._keys = [entry_key(blob) for blob in plan.blobs]
        self._ingest = ingest
        self._progress = progress
        self._readers = SourceReaders()
        self._maker = RunMaker(self._readers)
        self._finished: dict[int, FinishedBlob] = {}
        self._recalled = 0
        self._writers: dict[int, BlobWriter] = {}
        self._mutex = threading.Lock()
        self._runs = self._all_runs()
        self._first_error: tuple[float, BaseException | None] = (math.inf, None)

    def recall(self, jobs: int, *, verify: bool) -> None:
        """Find the blobs that an earlier import has made; with ``jobs`` threads where they have to be read."""
        threads = jobs if verify or self._ingest.has_leftovers() else 1
        with ThreadPoolExecutor(threads, thread_name_prefix="recall") as pool:
            try:
                for found in pool.map(lambda first: self._recall_each(first, threads, verify=verify), range(threads)):
                    self._finished.update(found)
            except BaseException:
                self.fail(-1, None)
                raise
        self._recalled = len(self._finished)
        if self._finished:
            self._progress(sum(self._blobs[number].source_bytes for number in self._finished), "")

    def _recall_each(self, first: int, step: int, *, verify: bool) -> dict[int, FinishedBlob]:
        """Return every ``step``-th blob from ``first`` that an earlier import has made, by its number."""
        found = {}
        for number in range(first, len(self._blobs), step):
            if self._first_error[0] != math.inf:
                break
            blob = self._ingest.recall(self._keys[number], self._blobs[number].size, verify=verify)
            if blob is not None:
                found[number] = blob
        return found

    def most_runs(self) -> int:
        """Return how many runs there are to make at most: more threads have nothing to do."""
        return sum(2 + 2 * max(blob.size, blob.source_bytes) // CHUNK for blob in self._to_make())

    def largest_run(self) -> int:
        """Return how many bytes a run has at most."""
        return min(CHUNK, max((blob.size for blob in self._to_make()), default=0))

    def _to_make(self) -> list[PlannedBlob]:
        return [blob for number, blob in enumerate(self._blobs) if number not in self._finished]

    def _all_runs(self) -> Iterator[tuple[int, int, Run]]:
        order = 0
        for number, blob in enumerate(self._blobs):
            if number in self._finished:
                continue
            self._writers[number] = self._ingest.writer(blob.size)
            for run in runs_of(blob):
                yield order, number, run
                order += 1

    def run(self, buffers: BufferPool) -> None:
        """Make runs until none is left, or one has failed that comes before the next."""
        while True:
            # The buffer first: a run that is begun must be able to end, since later ones wait to be hashed behind it.
            buffer = buffers.take()
            try:
                if not self._run_next(buffer):
                    return
            except BaseException:
                buffer.release()
                raise

    def _run_next(self, buffer: Buffer) -> bool:
        following = self._next_run()
        if following is None:
            buffer.release()
            return False
        order, number, run = following
        try:
            self._make(number, run, buffer)
        except BaseException as error:  # noqa: BLE001  # raised by `result`, when it is known to be the first
            self.fail(order, error)
            if writer := self._writers.get(number):
                writer.release()
            buffer.release()
        return True

    def _next_run(self) -> tuple[int, int, Run] | None:
        try:
            with self._mutex:
                return next(self._runs, None) if self._first_error[0] == math.inf else None
        except Exception as error:  # noqa: BLE001  # as above; every run that has begun comes before it
            self.fail(sys.maxsize, error)
            return None

    def _make(self, number: int, run: Run, buffer: Buffer) -> None:
        blob, writer = self._blobs[number], self._writers[number]
        data = buffer.at(run.begin, run.end - run.begin)
        for offset, companion in self._maker.make(run, data, blob.options):
            writer.put_aside(offset, companion)
        finished = writer.put(run.begin, data, gap=run.gap, aligned=True, hashed=buffer.release)
        if finished is not None:
            with self._mutex:
                self._finished[number] = finished
                del self._writers[number]
            self._ingest.finished(self._keys[number], finished)
        self._progress(run.source_bytes, blob.name)

    def fail(self, order: float, error: BaseException | None) -> None:
        """Let no further run begin, and keep the error of the first one that failed."""
        with self._mutex:
            if order < self._first_error[0]:
                self._first_error = (order, error)

    def result(self) -> WrittenBlobs:
        """Return the blobs. Raises: the first error; CorruptDataError when a source changed meanwhile."""
        if self._first_error[1] is not None:
            raise self._first_error[1]
        self._readers.check_unchanged()
        return WrittenBlobs([self._finished[number] for number in range(len(self._blobs))], self._keys, self._recalled)

    def close(self) -> None:
        """Close all files."""
        for writer in self._writers.values():
            writer.close()
        self._readers.close()
