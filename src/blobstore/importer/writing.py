"""Write: carry an import plan out. Nothing is decided here.

Threads take pieces of work in one order, each with a buffer of its own. A run of a large blob is
read, decoded, cast and quantized into the buffer, written to its place, and given to the hash
stage, where several blobs are hashed at once. Small blobs are made, hashed and written many in one
buffer. So all threads work on one large tensor as well as on many small ones, memory is that of the
buffers, and the bytes do not depend on the number of threads.

Local files are read where they lie, in the order of the plan (schedule.py). Files on servers are
fetched ahead (segments.py), and what is made of each part is made when it has come.

What an earlier session has made is not made again: its key is a hash of everything that a planned
blob's bytes depend on. Files of the source that are kept become blobs byte for byte.

The buffers are taken once and given back. How many there are bounds an import's memory. A thread
that finds none free hashes, which frees some.
"""

import hashlib
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeAlias

from blobstore import hashing
from blobstore.errors import (
    DigestMismatchError,
    RemoteError,
    ShortReadError,
    UsageError,
)
from blobstore.hashing.stage import HashStage
from blobstore.importer.making import CHUNK, RUN, RunMaker
from blobstore.importer.outputs import ImportPlan, OutputTensor, PlannedBlob, PlannedCopy
from blobstore.importer.schedule import (
    SMALL,
    WINDOW,
    DeclaredFiles,
    FarWork,
    Work,
    room_of,
    schedule,
)
from blobstore.importer.segments import SEGMENT, WAIT_S, Buffer, BufferPool, Segments
from blobstore.io.budget import allow_open_files
from blobstore.io.durable import PAGE
from blobstore.io.workers import Progress, each, no_progress, threads
from blobstore.source.folders import SourceFile
from blobstore.source.weights import FetchOptions, SourceReaders, SourceWeight, open_fetcher
from blobstore.store.ports import Finished, Session, Writer

# Goes up when the same weights are quantized to other bytes than before.
_ARITHMETIC = 1


WrittenBlobs: TypeAlias = tuple[list[Finished], int]
"""The tensor blobs of a plan, in its order; and how many earlier imports had made."""


class Means:
    """The threads that make blobs, the bytes that they work in, and how servers' files are fetched.

    ``verify``: hash what earlier imports have made before it is used again.
    """

    def __init__(
        self,
        jobs: int | None = None,
        memory: int | None = None,
        progress: Progress = no_progress,
        fetch: FetchOptions | None = None,
        *,
        verify: bool = False,
    ) -> None:
        """Raises: UsageError if the memory is too small for that many threads."""
        self.jobs = threads(jobs)
        self.memory = usual_memory(self.jobs) if memory is None else memory
        self.progress = progress
        self.fetch = fetch or FetchOptions()
        self.verify = verify
        if self.memory < (least := least_memory(self.jobs)):
            raise UsageError(
                f"{self.jobs} threads need more memory than {memory:,} bytes",
                hint=f"Give them at least {least:,} bytes, or use fewer threads.",
            )


def _recall(
    keys: Sequence[str], sizes: Sequence[int], session: Session, means: Means
) -> dict[int, Finished]:
    """Return the blobs that an earlier import has made, by number. Raises: StorageError."""
    finished: dict[int, Finished] = {}

    def find_one(number: int) -> None:
        blob = session.recall(keys[number], sizes[number], verify=means.verify)
        if blob is not None:
            finished[number] = blob

    if session.remembers:
        # A thread hashes one blob at a time, together with those of the others.
        jobs = min(means.jobs * hashing.width(), len(keys))
        each(range(len(keys)), find_one, jobs, name="recall")
    return finished


def _state(file: SourceFile) -> str:
    return f"{file.identity.key} {file.path!r}"


def entries_of(
    blobs: Iterable[PlannedBlob], state: Callable[[SourceFile], str] = _state
) -> Iterator[tuple[str, int]]:
    """Yield each blob's size and key: of its header, its sources' bytes and files, and the method.

    The header has names, dtypes, shapes and types. The ``state`` of a file is its path, device,
    inode, size and times, so a source that is written to, replaced or moved has other keys.
    """
    states: dict[int, str] = {}

    def known_state(file: SourceFile) -> str:
        if id(file) not in states:
            states[id(file)] = state(file)
        return states[id(file)]

    for blob in blobs:
        texts = []
        for tensor in blob.tensors:
            texts.append(_made(tensor, blob))
            texts += [_source_key(source, known_state) for source in tensor.sources]
        header = blob.header
        key = hashlib.sha256(b"%d\n%b" % (_ARITHMETIC, header) + "".join(texts).encode())
        yield key.hexdigest(), len(header) + blob.data_size


def _made(tensor: OutputTensor, blob: PlannedBlob) -> str:
    options = blob.options
    importance = options.importance.digest.hex if options.importance is not None else ""
    return f"{tensor.name}\n{tensor.copies}\n{tensor.dtype.value}\n{options.method}\n{importance}\n"


def _source_key(source: SourceWeight, state: Callable[[SourceFile], str]) -> str:
    parts = "\n".join(
        [
            f"{suffix} {part.dtype.value} {part.offset} {part.nbytes} {state(part.file)}"
            for suffix, part in source.parts.items()
        ]
    )
    kind = f"{source.form.value} {source.dtype.value} {source.quantization} {source.block}"
    coding = f"{source.inverse_scale} {source.coding}{source.change or ''}"
    return f"{source.name}\n{kind} {coding} {source.shape}\n{parts}\n"


SPARE_THREADS = 3
"""More threads than asked for, so that cores have work while threads wait for the disk."""
# Fewer are of use while others fetch.
_SPARE_FAR = 1
_BUFFERS_A_THREAD = 4
# Chunks that a thread needs besides its buffer: values read, decoded and cast, and scales.
_SCRATCH = 4
SEGMENTS = 16
"""Segments in memory at most: these bytes are under way on a fast line."""


def copy_file(layer: PlannedCopy, session: Session) -> Finished:
    """Return the blob of a file, written to ``session``; it is not yet visible.

    Raises: CorruptDataError when the file is not the one any more that was planned, or changes
    meanwhile; DigestMismatchError when its bytes do not have the hash that its server declares;
    NotFoundError; StorageError.
    """
    with layer.file.open() as reader:
        blob = session.copy(reader)
    layer.file.found.check(layer.file.path, blob.digest)
    return blob


def least_memory(jobs: int) -> int:
    """Return the bytes that ``jobs`` threads work in at least: without spare ones."""
    return jobs * (RUN + _SCRATCH * CHUNK)


def usual_memory(jobs: int) -> int:
    """Return the bytes that ``jobs`` threads work in when nothing else is said."""
    return (jobs + SPARE_THREADS) * (_BUFFERS_A_THREAD * RUN + _SCRATCH * CHUNK) + WINDOW * RUN


def files_of(plan: ImportPlan) -> dict[str, SourceFile]:
    """Return the files of a plan's tensors by path, in their order."""
    needed = {part.file.path for blob in plan.blobs for part in blob.parts if part.nbytes}
    # An adapter's first: what is read of it waits for the weights, which are larger.
    files = (file for one in plan.inventories for file in (*one.adapter_files, *one.files))
    return {file.path: file for file in files if file.path in needed}


def write_blobs(
    plan: ImportPlan, session: Session, means: Means, *, checks_source: bool = True
) -> WrittenBlobs:
    """Write the plan's tensor blobs; they are not yet visible.

    ``checks_source``: files on servers that have a declared digest are fetched and hashed whole.

    A blob that an earlier import of the same bytes has made is not made again.

    Raises: the error that comes first in the order of the work, whatever the number of threads
    (`each`): it names the tensor or the file; RemoteError and DigestMismatchError for files on
    servers, after which the next import goes on; StorageError. Nothing is committed here.
    """
    keys, sizes = [], array("Q")
    for key, size in entries_of(plan.blobs):
        keys.append(key)
        sizes.append(size)
    blobs = dict(enumerate(plan.blobs))
    finished = _recall(keys, sizes, session, means)
    if finished:
        means.progress(sum(blobs.pop(number).source_bytes for number in finished), "")
    files = files_of(plan)
    is_far = any(file.folder.is_remote for file in files.values())
    stage = HashStage()
    declared = DeclaredFiles(blobs if is_far and checks_source else {}, keys, sizes, session, stage)
    if unverified := declared.recall(verify=means.verify):
        means.progress(sum(blobs.pop(number).source_bytes for number in unverified), "")
        finished |= unverified
    recalled = len(finished)
    making = _Making(blobs, sizes, session, stage, declared, means, finished)
    try:
        make = making.make_far if is_far else making.make_local
        make(files)
    except (RemoteError, ShortReadError, DigestMismatchError):
        if is_far:
            session.keep()
        raise
    finally:
        for writer in list(making.writers.values()):
            writer.close()
    return [finished[number] for number in range(len(plan.blobs))], recalled


@dataclass(slots=True)
class _Making:
    """What the threads of one import share.

    ``blobs``: those to make, by number. ``sizes``: of all blobs of the plan.
    """

    blobs: Mapping[int, PlannedBlob]
    sizes: Sequence[int]
    session: Session
    stage: HashStage
    declared: DeclaredFiles
    means: Means
    finished: dict[int, Finished]
    stopped: threading.Event = field(default_factory=threading.Event)
    writers: dict[int, Writer] = field(default_factory=dict)

    def make_local(self, files: Mapping[str, SourceFile]) -> None:
        allow_open_files(len(files) + 3 * self.means.jobs * WINDOW)
        with closing(SourceReaders()) as readers:
            works = schedule(self.blobs, self.sizes)
            self._make_all(works, readers, SPARE_THREADS, self.means.memory)
            readers.check_unchanged()

    def make_far(self, files: Mapping[str, SourceFile]) -> None:
        """Make the blobs of files that are fetched.

        Three quarters of the memory that threads need not have are for segments.
        """
        jobs, memory = self.means.jobs, self.means.memory
        segments = Segments(files.values(), self.blobs.values(), self.declared.offsets)
        count = max(2, min(SEGMENTS, (memory - least_memory(jobs)) * 3 // 4 // SEGMENT))
        count = min(count, len(segments.all))
        largest = max((segment.nbytes for segment in segments.all), default=0)
        allow_open_files(4 * jobs + 3 * len(self.blobs))
        with open_fetcher(files.values(), self.means.fetch) as fetcher:
            work = FarWork(
                self.blobs,
                self.sizes,
                segments,
                fetcher,
                BufferPool(count, largest),
                self.declared,
                self.stage,
            )
            left = memory - count * largest
            try:
                self._make_all(work.works(self.stopped), work.readers, _SPARE_FAR, left)
            finally:
                work.close()
                self.declared.note_states()
        for file in files.values():
            if not file.folder.is_remote:  # servers were asked each time
                with file.open() as reader:
                    reader.check_unchanged()

    def _make_all(
        self, works: Iterator[Work], readers: SourceReaders, spare: int, memory: int
    ) -> None:
        sizes = [(self.sizes[number], blob.source_bytes) for number, blob in self.blobs.items()]
        runs = sum([2 + 2 * max(size, read) // RUN for size, read in sizes if size > SMALL])
        # More threads than runs would have nothing to do. Small blobs are work for one thread:
        # several would take turns with Python's lock.
        threads = max(1, min(self.means.jobs + spare, runs, memory // least_memory(1)))
        fit = (memory - threads * _SCRATCH * CHUNK) // RUN
        buffers = BufferPool(
            max(threads, min(threads + runs, fit)),
            min(RUN, sum([size + PAGE for size, _ in sizes])),
        )
        maker = RunMaker(readers)

        def make(item: tuple[Work, Buffer]) -> None:
            work, buffer = item
            make_one = self._make_small if work.is_small else self._make_run
            make_one(work, buffer, maker)
            self.stage.work_while(
                lambda: self.stage.is_full or buffers.free.empty() or self.declared.is_behind
            )

        each(self._with_buffers(works, buffers), make, threads, name="import", stop=self.stopped)
        each(range(threads), lambda _: self.stage.work_while(lambda: True), threads, name="hash")

    def _with_buffers(
        self, works: Iterator[Work], buffers: BufferPool
    ) -> Iterator[tuple[Work, Buffer]]:
        """Yield all work, each with a buffer.

        The buffer comes with the work: a started run must be able to end, since later ones
        wait for its hash.
        """
        for work in works:
            number = work.runs[0][0]
            if not work.is_small and number not in self.writers:
                self.writers[number] = self._writer(number)
            while (buffer := buffers.take(WAIT_S)) is None:
                if self.stopped.is_set():
                    return
            yield work, buffer

    def _writer(self, number: int) -> Writer:
        def finish(blob: Finished) -> None:
            self._finish(number, blob)
            del self.writers[number]

        return self.session.writer(self.sizes[number], finish, self.stage)

    def _make_run(self, work: Work, buffer: Buffer, maker: RunMaker) -> None:
        ((number, run),) = work.runs
        blob, writer = self.blobs[number], self.writers[number]
        data = buffer.at(run.begin, run.end - run.begin)
        with work.using:
            extra = maker.make(run, data, blob.options)
        writer.put(
            run.begin,
            data,
            extra=extra,
            gap=run.gap,
            aligned=True,
            waits=work.waits,
            hashed=buffer.release,
        )
        self.means.progress(run.source_bytes, blob.name)

    def _make_small(self, work: Work, buffer: Buffer, maker: RunMaker) -> None:
        made = []
        begin = 0
        with work.using:
            for small in work.runs:
                number, run = small
                made.append(memoryview(buffer.memory)[begin : begin + run.end])
                maker.make(run, made[-1], self.blobs[number].options)
                begin += room_of(small)
        for (number, run), blob in zip(work.runs, self.session.put_all(made), strict=True):
            self._finish(number, blob)
            self.means.progress(run.source_bytes, self.blobs[number].name)
        buffer.release()

    def _finish(self, number: int, blob: Finished) -> None:
        self.finished[number] = blob
        self.declared.note_finished(number, blob)
