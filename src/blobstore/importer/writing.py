"""Write: carry an import plan out. Nothing is decided here.

Threads take the runs of all blobs one after the other, each with a buffer of its own: source bytes
are read, decoded, cast and quantized into it, written to their place and hashed when everything
before them is. So all threads work on one large tensor as well as on many small ones, memory is
that of the buffers, and the bytes do not depend on the number of threads.

What an earlier session has made is not made again: its key is a hash of everything that a planned
blob's bytes depend on. Files of the source that are kept become blobs byte for byte.

The buffers are taken once and given back. How many there are bounds an import's memory.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import LifoQueue

from blobstore.errors import DigestMismatchError
from blobstore.importer.making import CHUNK, Run, RunMaker, runs_of
from blobstore.importer.planning.outputs import ImportPlan, OutputTensor, PlannedBlob, PlannedCopy
from blobstore.io.budget import allow_open_files
from blobstore.io.durable import PAGE, os_errors
from blobstore.io.workers import Progress, each
from blobstore.source.weights import SourceReaders, SourceWeight
from blobstore.store.ports import Finished, Session, Writer

# Page-aligned; and all there from the start: an import that begins does not run out of memory
# later.
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


class Buffer:
    """Memory for one run of up to ``nbytes``, aligned for writes that bypass the page cache."""

    def __init__(self, pool: BufferPool, nbytes: int) -> None:
        self._pool = pool
        self._memory = mmap.mmap(
            -1, nbytes + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _POPULATE
        )

    def at(self, offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of it; the address and ``offset`` are equal modulo the page size."""
        start = offset % PAGE
        return memoryview(self._memory)[start : start + nbytes]

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        self._pool.take_back(self)


class BufferPool:
    """``count`` buffers of ``nbytes`` each."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._free: LifoQueue[Buffer] = LifoQueue()
        self._taken: set[Buffer] = set()
        for _ in range(count):
            self._free.put(Buffer(self, nbytes))

    def take(self) -> Buffer:
        """Return a free buffer, when there is one."""
        buffer = self._free.get()
        self._taken.add(buffer)
        return buffer

    def take_back(self, buffer: Buffer) -> None:
        """Make a buffer free that was taken."""
        with suppress(KeyError):  # it was given back before
            self._taken.remove(buffer)
            self._free.put(buffer)


def copy_file(layer: PlannedCopy, session: Session) -> Finished:
    """Return the blob of a file, written to ``session``; it is not yet visible.

    Raises: CorruptDataError when the file is not the one any more that was planned, or changes
    meanwhile; NotFoundError; StorageError.
    """
    with layer.file.open() as reader:
        blob = session.copy(reader)
        reader.check_unchanged()
    declared = layer.file.found.declared
    if declared is not None and blob.digest != declared:
        message = (
            f"{layer.file.path}: its bytes are not those of {declared}, which its server declares"
        )
        raise DigestMismatchError(message, path=layer.file.path)
    return blob


_ARITHMETIC = 1
"""Goes up when the same weights are quantized to other bytes than before."""


def entry_key(blob: PlannedBlob) -> str:
    """Return the key of a blob: of its header, its sources' bytes and files, and the method.

    The header has names, dtypes, shapes and types. A file's state is its path, device, inode, size
    and times: a source that is written to, replaced or moved has other keys.
    """
    hashed = hashlib.sha256(b"%d\n" % _ARITHMETIC)
    hashed.update(blob.header)
    for tensor in blob.tensors:
        hashed.update(_made(tensor, blob).encode())
        for source in tensor.sources:
            hashed.update(_stored(source).encode())
    return hashed.hexdigest()


def _made(tensor: OutputTensor, blob: PlannedBlob) -> str:
    """Say what the header does not say about how a tensor is made."""
    options = blob.options
    importance = options.importance.digest.hex if options.importance is not None else ""
    return f"{tensor.name}\n{tensor.copies}\n{tensor.dtype}\n{options.method}\n{importance}\n"


def _stored(source: SourceWeight) -> str:
    parts = (
        f"{suffix} {part.dtype} {part.offset} {part.nbytes} "
        f"{part.file.identity.key} {part.file.path!r}"
        for suffix, part in source.parts.items()
    )
    form = f"{source.form.value} {source.dtype} {source.quantization}"
    form += f" {source.inverse_global_scale} {source.shape}"
    return f"{source.name}\n{form}\n" + "\n".join(parts) + "\n"


_BUFFERS_A_THREAD = 4
_SCRATCH = 4
"""Chunks that a thread needs besides its buffer: values read, decoded and cast, and scales."""
_SPARE_THREADS = 1
"""More threads than asked for, so that a core has work while a thread waits for the disk."""


def least_memory(jobs: int) -> int:
    """Return the bytes that ``jobs`` threads work in at least."""
    return (jobs + _SPARE_THREADS) * (1 + _SCRATCH) * CHUNK


def usual_memory(jobs: int) -> int:
    """Return the bytes that ``jobs`` threads work in when nothing else is said."""
    return (jobs + _SPARE_THREADS) * (_BUFFERS_A_THREAD + _SCRATCH) * CHUNK


@dataclass(frozen=True, slots=True)
class WrittenBlobs:
    """The tensor blobs of a plan, in its order; and how many earlier imports had made."""

    blobs: list[Finished]
    recalled: int


def write_blobs(
    plan: ImportPlan,
    session: Session,
    jobs: int,
    memory: int,
    progress: Progress,
    *,
    verify_reuse: bool,
) -> WrittenBlobs:
    """Write the plan's tensor blobs with ``jobs`` threads in ``memory`` bytes.

    They are not yet visible.

    A blob that an earlier import of the same bytes has made is not made again; with
    ``verify_reuse`` only when its bytes are its digest's.

    Raises: the error of the first run in plan order that fails, whatever the number of threads: it
    names the tensor or the file; StorageError. Nothing is committed here.
    """
    allow_open_files(sum(len(inventory.files) for inventory in plan.inventories) + 2 * jobs)
    work = _Work(plan, session, progress)
    try:
        work.recall(jobs, verify=verify_reuse)
        to_make = work.to_make()
        # More threads than runs would have nothing to do.
        runs = sum(2 + 2 * max(blob.size, blob.source_bytes) // CHUNK for blob in to_make)
        threads = max(1, min(jobs + _SPARE_THREADS, runs))
        largest = min(CHUNK, max((blob.size for blob in to_make), default=0))
        buffers = _buffers(threads, runs, memory, largest)
        each(work.runs(buffers), work.make, threads, name="import")
        return work.result()
    finally:
        work.close()


def _buffers(threads: int, runs: int, memory: int, nbytes: int) -> BufferPool:
    """Return as many buffers as are of use and fit the memory.

    Raises: StorageError when there is not so much memory.
    """
    count = max(threads, min(threads + runs, memory // CHUNK - threads * _SCRATCH))
    with os_errors("take", f"{count * nbytes:,} bytes of memory"):
        return BufferPool(count, nbytes)


class _Work:
    """What the threads of one import share."""

    def __init__(self, plan: ImportPlan, session: Session, progress: Progress) -> None:
        self._blobs = plan.blobs
        self._keys = [entry_key(blob) for blob in plan.blobs]
        self._session = session
        self._progress = progress
        self._readers = SourceReaders()
        self._maker = RunMaker(self._readers)
        self._finished: dict[int, Finished] = {}
        self._recalled = 0
        self._writers: dict[int, Writer] = {}
        self._mutex = threading.Lock()

    def recall(self, jobs: int, *, verify: bool) -> None:
        """Find the blobs that an earlier import has made.

        With ``jobs`` threads where they have to be read.
        """
        earlier = self._session.earlier
        if earlier is None:
            return

        def find_one(number: int) -> None:
            blob = earlier.find(self._keys[number], self._blobs[number].size, verify=verify)
            if blob is not None:
                self._finished[number] = blob

        threads = jobs if verify or earlier.takes_time() else 1
        each(range(len(self._blobs)), find_one, threads, name="recall")
        self._recalled = len(self._finished)
        if self._finished:
            self._progress(sum(self._blobs[number].source_bytes for number in self._finished), "")

    def to_make(self) -> list[PlannedBlob]:
        """Return the blobs that no earlier import has made."""
        return [blob for number, blob in enumerate(self._blobs) if number not in self._finished]

    def runs(self, buffers: BufferPool) -> Iterator[tuple[int, Run, Buffer]]:
        """Yield the runs of all blobs to make, each with its blob's number and a buffer.

        The buffer comes with the run: one that is begun must be able to end, since later ones wait
        to be hashed behind it.
        """
        for number, blob in enumerate(self._blobs):
            if number in self._finished:
                continue
            self._writers[number] = self._session.writer(blob.size)
            for run in runs_of(blob):
                yield number, run, buffers.take()

    def make(self, item: tuple[int, Run, Buffer]) -> None:
        """Make one run.

        After an error its blob's buffers are free, because the thread of the next run waits for
        one.
        """
        number, run, buffer = item
        try:
            self._make(number, run, buffer)
        except BaseException:
            if writer := self._writers.get(number):
                writer.release()
            buffer.release()
            raise

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
            if self._session.earlier is not None:
                self._session.earlier.note(self._keys[number], finished)
        self._progress(run.source_bytes, blob.name)

    def result(self) -> WrittenBlobs:
        """Return the blobs. Raises: CorruptDataError when a source changed meanwhile."""
        self._readers.check_unchanged()
        return WrittenBlobs(
            [self._finished[number] for number in range(len(self._blobs))], self._recalled
        )

    def close(self) -> None:
        """Close all files."""
        for writer in self._writers.values():
            writer.close()
        self._readers.close()
