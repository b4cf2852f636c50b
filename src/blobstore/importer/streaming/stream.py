"""Stream: carry a plan out whose source is on a server. See docs/decisions/2026-11-23-afar.md.

Segments of the source's files are fetched ahead, in the order in which they are used. The pieces of
blobs are made from them in memory, and written to their places in any order. What was done is kept
if the import is killed, interrupted or cut off, and the next import of the plan goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from blobstore.errors import RemoteError, ShortReadError
from blobstore.hashing.stage import HashStage
from blobstore.importer.buffers import BufferPool
from blobstore.importer.keys import entry_keys
from blobstore.importer.making import CHUNK
from blobstore.importer.planning.outputs import ImportPlan, PlannedBlob
from blobstore.importer.recalling import WrittenBlobs, recall
from blobstore.importer.streaming.agenda import Agenda, files_of_blob
from blobstore.importer.streaming.arrived import ArrivedSegments
from blobstore.importer.streaming.arriving import ArrivingBytes, part_path
from blobstore.importer.streaming.crew import Crew
from blobstore.importer.streaming.flow import FileHashes
from blobstore.importer.streaming.held import HeldBytes, held_path
from blobstore.importer.streaming.keeping import KeptWork, StreamedBlobs
from blobstore.importer.streaming.needs import Need
from blobstore.importer.streaming.pieces import PIECE, cut_files, files_of
from blobstore.importer.streaming.resuming import WorkDone, begun_path, find_done
from blobstore.importer.streaming.ring import Ring
from blobstore.importer.streaming.segments import SegmentSizes, SourceSegments
from blobstore.importer.streaming.span_sums import SourceChecks, SpanSums
from blobstore.importer.streaming.worklog import LoggedWork, WorkLog
from blobstore.io.budget import allow_open_files
from blobstore.io.durable import PAGE, os_errors
from blobstore.io.workers import Progress
from blobstore.names import Digest
from blobstore.source.fetching import Fetcher, FetchOptions, fetchers_of
from blobstore.source.weights import SourceFile
from blobstore.store.ports import Finished, Session

_VERSION = 3
"""Goes up when the log, or the order of the segments, changes."""
_SPARE_THREADS = 1
"""Fewer than local imports have: while some wait for the disk, those that fetch have work."""
_SCRATCH = 4 * CHUNK
"""Bytes that a thread needs besides its buffers."""


def write_streamed(
    plan: ImportPlan,
    session: Session,
    jobs: int,
    memory: int,
    progress: Progress,
    *,
    verify_reuse: bool,
    fetch: FetchOptions | None = None,
    checks: SourceChecks | None = None,
    sizes: SegmentSizes | None = None,
) -> WrittenBlobs:
    """Write the plan's tensor blobs, from segments that are fetched. They are not yet visible.

    ``memory``: bytes that ``jobs`` threads work in, segments included. ``checks``: of files whose
    server declares a digest (None: all are fetched and hashed whole). With spans to check, nothing
    of earlier imports is used: their bytes have to pass. ``sizes``: of the segments (None: by the
    size of the source).

    Raises: as `writing.write_blobs`; RemoteError, after which the next import goes on, as after a
    kill; DigestMismatchError for a file that does not have its declared digest.
    """
    keys, checks = list(entry_keys(plan.blobs)), checks or SourceChecks()
    finished: dict[int, Finished] = {}
    if not checks.spans:
        finished = recall(plan.blobs, keys, session, jobs, progress, verify=verify_reuse)
    to_make = {n: blob for n, blob in enumerate(plan.blobs) if n not in finished}
    recalled = len(finished)
    sums: Mapping[tuple[str, int, int], Digest] = {}
    if to_make:
        try:
            stream = _Stream(plan, keys, to_make, session, sizes, progress, checks)
            made, sums = stream.run(jobs, memory, fetch or FetchOptions())
            finished |= made
        except (RemoteError, ShortReadError):
            if session.earlier is not None:
                session.earlier.keep()
            raise
    return WrittenBlobs([finished[number] for number in range(len(plan.blobs))], recalled, sums)


class _Stream:
    """One streamed import of the blobs ``to_make``, by number."""

    def __init__(
        self,
        plan: ImportPlan,
        keys: Sequence[str],
        to_make: Mapping[int, PlannedBlob],
        session: Session,
        sizes: SegmentSizes | None,
        progress: Progress,
        checks: SourceChecks,
    ) -> None:
        self._plan = plan
        self._keys = keys
        self._to_make = to_make
        self._session = session
        self._progress = progress
        self._files = files_of(plan)
        total = sum(file.size for file in self._files.values())
        self._sizes = sizes or SegmentSizes.of(total)
        self._checks = checks
        declared = {path for path, file in self._files.items() if file.declared is not None}
        hashed = frozenset(declared if checks.whole is None else declared & checks.whole)
        self._segments = cut_files(plan, self._sizes, hashed)

    def _noted(self) -> list[str | None]:
        """Return the keys of the blobs; None for those whose bytes another machine checks."""
        hashed = self._segments.hashed
        is_noted = [
            not self._checks.spans
            or all(file.declared is None or file.path in hashed for file in files_of_blob(blob))
            for blob in self._plan.blobs
        ]
        return [key if noted else None for key, noted in zip(self._keys, is_noted, strict=True)]

    def run(
        self, jobs: int, memory: int, fetch: FetchOptions
    ) -> tuple[dict[int, Finished], Mapping[tuple[str, int, int], Digest]]:
        """Return the blobs, by number, and the digests of spans. Raises: as `write_streamed`."""
        stage = HashStage()
        with ExitStack() as stack:
            work = stack.enter_context(self._work())
            done = self._done(work, jobs)
            written = StreamedBlobs(self._plan.blobs, self._noted(), self._session, stage, work)
            stack.callback(written.close)
            held = HeldBytes(work.folder if work is not None else None)
            stack.callback(held.close)
            self._resume(done, written, held)
            fetchers = stack.enter_context(fetchers_of(self._files, fetch))
            logged = ((self._segments[one.number], one) for one in done.logged.segments)
            sums = SpanSums(self._checks.spans, logged)
            crew = Crew(
                self._plan.blobs,
                done.agenda,
                written,
                ArrivedSegments(self._segments, held),
                FileHashes(stage, self._segments.hashed, done.states),
                sums,
                stage,
                work.log if work is not None else None,
                self._arriving(work, done),
                fetchers,
                self._progress,
            )
            window = self._window(jobs, memory)
            fetching = _at_once(fetchers.values(), window, self._sizes)
            making = jobs + _SPARE_THREADS
            buffers = BufferPool(3 * making + 4, PIECE)
            stack.callback(buffers.close)
            allow_open_files(4 * making + self._segments.count + 3 * len(self._to_make))
            crew.run(fetching, making, Ring(window), buffers)
            written.trust(list(self._to_make))
            self._check_unchanged()
            return written.finished, sums.digests

    @contextmanager
    def _work(self) -> Iterator[KeptWork | None]:
        """Return the unfinished work of killed imports of this plan, if the home keeps it."""
        unfinished = self._session.unfinished
        if unfinished is None:
            yield None
            return
        key = work_key(self._keys, self._files, self._segments, self._sizes, self._checks.spans)
        folder = unfinished.begin(key)
        log = WorkLog(folder)
        try:
            yield KeptWork(folder, log, unfinished)
        finally:
            log.close()

    def _done(self, work: KeptWork | None, jobs: int) -> WorkDone:
        """Return what was done before. The log has no more than that, and the folder neither."""
        if work is None:
            return WorkDone(Agenda(self._to_make, self._segments), LoggedWork())
        logged = work.log.read()
        done = find_done(work.folder, logged, self._to_make, self._segments, work.unfinished, jobs)
        used = {work.folder / "log"}
        for one in done.blobs:
            used.update(held_path(work.folder, number) for number in one.held)
            if one.made and one.finished is None:
                used.add(begun_path(work.folder, one.number))
        used.update(part_path(work.folder, number) for number in done.arrived)
        with os_errors("clean up", work.folder):
            for path in set(work.folder.iterdir()) - used:
                path.unlink()
        work.log.begin_again(done.logged)
        return done

    def _arriving(self, work: KeptWork | None, done: WorkDone) -> ArrivingBytes | None:
        step = self._sizes.step
        if work is None or step is None:
            return None
        return ArrivingBytes(work.folder, work.log, step, done.arrived)

    def _resume(self, done: WorkDone, written: StreamedBlobs, held: HeldBytes) -> None:
        for one in done.blobs:
            for number, until in one.held.items():
                held.keep(number, until)
            is_trusted = done.agenda.trusted_at(one.number) < done.agenda.begun
            written.resume(one, is_trusted=is_trusted)
            nbytes = sum(piece.run.source_bytes for piece in one.made)
            if nbytes:
                self._progress(nbytes, self._plan.blobs[one.number].name)

    def _window(self, jobs: int, memory: int) -> int:
        """Return how many bytes of segments may be in memory: at least two of the largest."""
        spare = memory - jobs * (_SCRATCH + PIECE)
        return max(2 * (self._sizes.most + PAGE), min(self._sizes.window, spare))

    def _check_unchanged(self) -> None:
        """Raise CorruptDataError if a file on a disk changed; servers were asked each time."""
        for file in self._files.values():
            if not file.folder.is_remote:
                with file.open() as reader:
                    reader.check_unchanged()


def work_key(
    keys: Sequence[str],
    files: Mapping[str, SourceFile],
    segments: SourceSegments,
    sizes: SegmentSizes,
    spans: Sequence[Need] = (),
) -> str:
    """Return the name of the work of a plan: of its blobs, files and segments."""
    hashed = segments.hashed
    declared = [f"{path!r} {file.declared}" for path, file in files.items() if path in hashed]
    summed = [f"{path!r} {begin} {end}" for path, begin, end in spans]
    text = "\n".join([f"{_VERSION} {sizes}", *declared, *summed, *keys])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _at_once(fetchers: Iterable[Fetcher], window: int, sizes: SegmentSizes) -> int:
    """Return how many threads fetch: no more than segments fit the memory."""
    wanted = max((fetcher.at_once for fetcher in fetchers), default=1)
    return max(1, min(wanted, window // sizes.aim))
