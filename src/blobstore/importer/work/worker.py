"""A worker of a plan: it makes the blobs of tasks, leaves them in the store, and writes receipts.

Any worker may be killed at any time, and two may do the same task. A task with a receipt is done if
the store still has its blobs. Without one, the store's journal may know the blobs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from blobstore.errors import BlobStoreError, DocumentError, UsageError
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor
from blobstore.importer.planning.outputs import ImportPlan, PlannedBlob
from blobstore.importer.planning.travel import decode_plan, plan_bytes
from blobstore.importer.run import working_memory
from blobstore.importer.work.receipts import ReceiptFolder
from blobstore.importer.work.tasks import DividedPlan, Task
from blobstore.importer.writing import write_blobs
from blobstore.io.workers import Progress, begun, each, silent, threads
from blobstore.names import Digest
from blobstore.source.addresses import OpenSource, Source, open_folder
from blobstore.store.ports import Home, Session

_log = logging.getLogger("blobstore.importer.work")
_AT_ONCE: Final = 2**30
"""Bytes of the source of tasks that are made together, and made durable once."""


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """A plan's file that several machines carry out: path, digest, tasks, receipts."""

    path: str
    digest: Digest
    divided: DividedPlan
    receipts: ReceiptFolder

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        source: Source | None = None,
        open_source: OpenSource = open_folder,
    ) -> SharedPlan:
        """Return the plan in a file. Raises: as `read_plan`."""
        raw = plan_bytes(path)
        plan = decode_plan(raw, path, source=source, open_source=open_source)
        return cls.of(plan, Digest.of(raw), path)

    @classmethod
    def of(cls, plan: ImportPlan, digest: Digest, path: str | os.PathLike[str]) -> SharedPlan:
        """Return a plan whose file at ``path`` has that digest; the file need not be there."""
        return cls(os.fspath(path), digest, DividedPlan(plan), ReceiptFolder(path, digest))

    def unfinished(self, store: Home) -> list[Task]:
        """Return the tasks without a receipt, or whose blobs the store does not have.

        Raises: UsageError for receipts of another plan; StorageError.
        """
        found = []
        with store.session(self.divided.plan.inventory.folder.key) as session:
            for task in self.divided.tasks:
                blobs = self.made_of(task)
                if not blobs or lost_among(blobs, session, store, verify=False):
                    found.append(task)
        return found

    def made_of(self, task: Task) -> Sequence[Descriptor]:
        """Return the blobs in a task's receipt; empty if it is missing or damaged."""
        try:
            return self.receipts.read(task) or ()
        except DocumentError as error:
            _log.warning("%s", error)
            return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkResult:
    """The outcome of a shard: ``made`` of its ``tasks`` were done now, the others before.

    Bytes are those of the tasks that were made: read from the source, and in blobs.
    """

    plan: Digest
    shard: tuple[int, int]
    tasks: int
    made: int
    blobs: int
    source_bytes: int
    stored_bytes: int
    seconds: float


def work_on_plan(
    path: str | os.PathLike[str],
    *,
    shard: tuple[int, int] = (0, 1),
    store: Home,
    source: Source | None = None,
    open_source: OpenSource = open_folder,
    jobs: int | None = None,
    memory: int | None = None,
    verify_reuse: bool = False,
    progress: Progress | None = None,
) -> WorkResult:
    """Do the tasks of shard (i, n) of the plan in a file, except those that are done.

    The blobs are left in ``store`` for `commit_plan`; nothing becomes visible. ``source``: where
    the source is now. ``jobs``, ``memory``: as `import_model`. ``verify_reuse``: hash blobs that
    are there before they count as done.

    Raises: as `read_plan` and `import_model`; UsageError for receipts of another plan, or a store
    that does not remember what was made.
    """
    started = time.monotonic()
    worker = TaskWork(store, jobs, memory, verify_reuse=verify_reuse)
    shared = SharedPlan.read(path, source=source, open_source=open_source)
    tasks = shared.divided.shard(*shard)
    shown = begun(progress, sum(task.source_bytes for task in tasks))
    made = [task for some in worker.portions(tasks) for task in worker.do(shared, some, shown)]
    return WorkResult(
        plan=shared.digest,
        shard=shard,
        tasks=len(tasks),
        made=len(made),
        blobs=sum(len(task.blobs) for task in made),
        source_bytes=sum(task.source_bytes for task in made),
        stored_bytes=sum(blob.size for task in made for blob in task.blobs),
        seconds=time.monotonic() - started,
    )


class TaskWork:
    """Does tasks of plans in a store with some threads, and writes their receipts."""

    def __init__(
        self,
        store: Home,
        jobs: int | None = None,
        memory: int | None = None,
        *,
        verify_reuse: bool = False,
    ) -> None:
        self._store = store
        self._jobs = threads(jobs)
        self._memory = working_memory(memory, self._jobs)
        self._verify = verify_reuse

    def portions(self, tasks: Sequence[Task]) -> Iterator[list[Task]]:
        """Yield the tasks in portions that are made together, and made durable once."""
        portion: list[Task] = []
        nbytes = 0
        for task in tasks:
            if portion and nbytes + task.source_bytes > _AT_ONCE:
                yield portion
                portion, nbytes = [], 0
            portion.append(task)
            nbytes += task.source_bytes
        if portion:
            yield portion

    def do(
        self, shared: SharedPlan, tasks: Sequence[Task], progress: Progress = silent
    ) -> list[Task]:
        """Do those of some tasks that are not done; return them. Raises: as `work_on_plan`."""
        maker = TaskMaker(
            shared.divided, self._store, self._jobs, self._memory, verify=self._verify
        )
        done = {task.number: shared.made_of(task) for task in tasks}
        made = maker.make(tasks, done, progress)
        if made:
            shared.receipts.make()
        for task, blobs in made:
            shared.receipts.write(task, blobs)
        return [one.task for one in made]


class MadeTask(NamedTuple):
    """A task that was made, with its blobs, durable in the store."""

    task: Task
    blobs: list[Descriptor]


class TaskMaker:
    """Makes the blobs of tasks in a store, with some threads in some bytes of memory."""

    def __init__(
        self,
        divided: DividedPlan,
        store: Home,
        jobs: int,
        memory: int,
        *,
        verify: bool,
    ) -> None:
        self._divided = divided
        self._store = store
        self._jobs = jobs
        self._memory = memory
        self._verify = verify

    def make(
        self,
        tasks: Sequence[Task],
        done: dict[int, Sequence[Descriptor]],
        progress: Progress = silent,
    ) -> list[MadeTask]:
        """Return the tasks that were made.

        ``done``: blobs of each task, by its number, that are used again if the store has them.
        """
        source = self._divided.plan.inventory.folder.key
        with self._store.session(source) as session:
            if not session.remembers:
                raise UsageError(
                    f"{self._store.address} does not remember what was made",
                    hint="Work in a store in a folder, or in a bucket.",
                )
            there: dict[str, Descriptor] = {}
            missing: list[PlannedBlob] = []
            unfinished = []
            for task in tasks:
                kept = self._there(task, done[task.number], session)
                there |= kept
                lost = [blob for blob in task.blobs if blob.name not in kept]
                missing += lost
                if lost:
                    unfinished.append(task)
                progress(sum(b.source_bytes for b in task.blobs if b.name in kept), "")
            if missing:
                there |= self._write(missing, session, progress)
                session.keep()
        return [MadeTask(task, [there[blob.name] for blob in task.blobs]) for task in unfinished]

    def _there(
        self, task: Task, blobs: Sequence[Descriptor], session: Session
    ) -> dict[str, Descriptor]:
        """Return those of a task's blobs that the store has, by name."""
        lost = lost_among(blobs, session, self._store, verify=self._verify, jobs=self._jobs)
        named = zip(task.blobs, blobs, strict=False)  # of a task without a receipt, none
        return {planned.name: blob for planned, blob in named if blob.digest not in lost}

    def _write(
        self, blobs: list[PlannedBlob], session: Session, progress: Progress
    ) -> dict[str, Descriptor]:
        written = write_blobs(
            self._divided.only(blobs),
            session,
            self._jobs,
            self._memory,
            progress,
            verify_reuse=self._verify,
        )
        return {
            planned.name: Descriptor(TENSOR_MEDIA_TYPE, blob.digest, blob.size, name=planned.name)
            for planned, blob in zip(blobs, written.blobs, strict=True)
        }


def lost_among(
    blobs: Collection[Descriptor],
    session: Session,
    store: Home,
    *,
    verify: bool,
    jobs: int = 1,
    progress: Progress = silent,
    headers: Mapping[str, bytes] = MappingProxyType({}),
) -> set[Digest]:
    """Return the digests of those of ``blobs`` that are neither published nor kept by a session.

    Sizes are checked; with ``verify``, ``jobs`` threads also hash them, and a blob that does not
    begin with the one of ``headers`` for its name is not there: it is another of the same size.
    Raises: StorageError.
    """
    lost: set[Digest] = set()
    if not blobs:  # to start threads takes milliseconds, and most tasks have no receipt yet
        return lost
    hidden = {blob.digest for blob in session.missing(blobs)}

    def check(blob: Descriptor) -> None:
        header = headers.get(blob.name or "", b"")
        if blob.digest in hidden:
            is_there = _is_kept(blob, session, header, verify=verify)
        else:
            is_there = not verify or _is_sound(blob, store, header)
        if not is_there:
            lost.add(blob.digest)
        progress(blob.size, blob.name or "")

    each(blobs, check, jobs, name="check")
    return lost


def _is_kept(blob: Descriptor, session: Session, header: bytes, *, verify: bool) -> bool:
    found = session.recall(blob.digest.hex, blob.size, verify=verify)
    if found is None or not header:
        return found is not None
    with session.open(found) as reader:
        return reader.read(0, len(header)) == header


def _is_sound(blob: Descriptor, store: Home, header: bytes) -> bool:
    try:
        with store.blobs.open(blob) as reader:
            return reader.read(0, len(header)) == header and reader.digest() == blob.digest
    except BlobStoreError as error:
        _log.warning("blob %s can't be used: %s", blob.digest, error)
        return False
