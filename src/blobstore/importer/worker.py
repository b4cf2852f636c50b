"""Work and commit: workers make the blobs of tasks, and one commit publishes the model.

A worker leaves blobs in the store, and then writes the receipts of their tasks. The plan in
``plan.json`` has its receipts in ``plan.json.receipts/``, one file for each task. They are the only
state apart from the blobs themselves. Any worker may be killed at any time, and two may do the same
task. A task with a receipt is done if the store still has its blobs. Without one, the store's
journal may know them.

Rule P3: a receipt is the one text that says which blobs its task became: a JSON object of version
3, with the plan's digest, the task's number, and name, digest and size of each blob in its order.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Annotated

from blobstore.errors import (
    BlobStoreError,
    DocumentError,
    MissingFileError,
    UnfinishedPlanError,
    UsageError,
)
from blobstore.formats import strictjson
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor
from blobstore.importer.outputs import ImportPlan, PlannedBlob
from blobstore.importer.planfile import decode_plan, plan_bytes
from blobstore.importer.run import (
    ImportResult,
    make_blobs,
    name_for,
    publish_plan,
)
from blobstore.importer.writing import Means, WrittenBlobs
from blobstore.io.durable import make_folder, os_errors, read_own, replace_file
from blobstore.io.workers import Progress, batches, each, no_progress, start_progress, threads
from blobstore.names import Digest, ModelName, shortened
from blobstore.source.addresses import OpenSource, Source, open_folder
from blobstore.source.folders import SourceFile
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import Home, Session

TASK_BLOBS = 256
_LEAST_BYTES = 2**20
_MOST_BYTES = 256 * 2**20
# The size of tasks, within these bounds, gives a plan at least this many of them.
_TASKS = 64
_UNITS = 32
# Files with declared digests are united up to this many bytes, or this part of the source.
_LEAST_UNIT = 2**30


@dataclass(frozen=True, slots=True)
class Task:
    """Some blobs of a plan: its number, the number of its first file in the plan, and the blobs."""

    number: int
    file: int
    blobs: tuple[PlannedBlob, ...]

    @property
    def source_bytes(self) -> int:
        return sum(blob.source_bytes for blob in self.blobs)

    @property
    def cost(self) -> int:
        return sum(blob.source_bytes + blob.size for blob in self.blobs)


def tasks_of(plan: ImportPlan) -> tuple[Task, ...]:
    """Return all tasks of a plan."""
    files = [file for inventory in plan.inventories for file in inventory.files]
    own = len(files)
    files += [file for inventory in plan.inventories for file in inventory.adapter_files]
    numbers = {file.path: number for number, file in enumerate(files)}
    extents = []
    for blob in plan.blobs:
        places = sorted((numbers[part.file.path], part.offset) for part in blob.parts)
        # An adapter's file would join those of all weights to one unit.
        places = [place for place in places if place[0] < own] or places
        extents.append((places[0], places[-1]))
    units = _units(files, [(first, last) for (first, _), (last, _) in extents])
    ordered = sorted(range(len(extents)), key=lambda number: extents[number])
    most = min(max(_LEAST_BYTES, plan.source_bytes // _TASKS), _MOST_BYTES)
    tasks: list[Task] = []
    for unit, members in groupby(ordered, key=lambda number: units[extents[number][0][0]]):
        blobs = [plan.blobs[number] for number in members]
        is_whole = files[unit].declared is not None
        portions = batches(blobs, lambda one: max(one.source_bytes, most // TASK_BLOBS), most)
        for portion in [blobs] if is_whole else portions:
            tasks.append(Task(len(tasks), unit, tuple(portion)))
    return tuple(tasks)


def _units(files: Sequence[SourceFile], extents: Iterable[tuple[int, int]]) -> list[int]:
    """Return the first file of the unit that each file belongs to.

    ``extents``: the first and the last file of each blob.
    """
    shared = {number for first, last in extents for number in range(first + 1, last + 1)}
    most = max(sum(file.size for file in files) // _UNITS, _LEAST_UNIT)
    units: list[int] = []
    nbytes = 0
    for number, file in enumerate(files):
        nbytes += file.size
        is_declared = file.declared is not None and files[number - 1].declared is not None
        if number in shared and is_declared and nbytes <= most:
            units.append(units[-1])
        else:
            units.append(number)
            nbytes = file.size
    return units


def shard_of(tasks: Sequence[Task], index: int, count: int) -> tuple[Task, ...]:
    """Return the tasks of shard ``index`` of ``count``, counted from 0.

    Shards are consecutive tasks of about the same cost; some may be empty. A file's tasks are in
    one shard if there are as many files as shards.

    Raises: UsageError for an index that is out of range.
    """
    check_shard(index, count)
    files = [tuple(group) for _, group in groupby(tasks, key=lambda task: task.file)]
    units = files if len(files) >= count else [(task,) for task in tasks]
    costs = [sum(task.cost for task in unit) for unit in units]
    total = sum(costs)
    shard: list[Task] = []
    for unit, cost, end in zip(units, costs, accumulate(costs), strict=True):
        if (2 * end - cost) * count // (2 * total) == index:  # where its middle is
            shard += unit
    return tuple(shard)


def check_shard(index: int, count: int) -> None:
    """Raise UsageError unless ``index`` is one of ``count`` shards, counted from 0."""
    if not 0 <= index < count:
        raise UsageError(
            f"shard {index}/{count} does not exist",
            hint="Shards are counted from 0: the only one is 0/1, those of three are 0/3 to 2/3.",
        )


_log = logging.getLogger("blobstore.importer.work")
RULE = "P3"
_LARGEST = 64 * 2**20
# Bytes of the source of tasks that are made together, and made durable once.
_AT_ONCE = 2**30
_MOST_NAMED = 10


@dataclass(frozen=True)
class SharedPlan:
    """A plan, its tasks, and the path and digest of its file, which need not exist."""

    plan: ImportPlan
    path: str
    digest: Digest

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        return tasks_of(self.plan)

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        source: Source | None = None,
        open_source: OpenSource = open_folder,
    ) -> SharedPlan:
        raw = plan_bytes(path)
        plan = decode_plan(raw, path, source=source, open_source=open_source)
        return cls(plan, os.fspath(path), Digest.of(raw))

    def _receipt(self, task: Task) -> Path:
        return Path(f"{self.path}.receipts", f"{task.number:06}.json")

    def write_receipt(self, task: Task, blobs: Sequence[Descriptor]) -> None:
        path = self._receipt(task)
        with os_errors("write", path):
            make_folder(path.parent, durable=False)
            replace_file(path, self._encode(task, blobs))

    def _encode(self, task: Task, blobs: Iterable[Descriptor]) -> bytes:
        listed = [
            {"name": blob.name, "digest": str(blob.digest), "size": blob.size} for blob in blobs
        ]
        document = {"version": 3, "plan": str(self.digest), "task": task.number, "blobs": listed}
        return strictjson.encode(document) + b"\n"

    def read_receipt(self, task: Task) -> list[Descriptor] | None:
        """Return the blobs in the receipt of a task, or None if it is missing.

        Raises: DocumentError (rule P3) for an invalid one, or one of another plan;
        LimitExceededError; StorageError.
        """
        path = self._receipt(task)
        try:
            raw = read_own(path, _LARGEST)
        except MissingFileError:
            return None
        what = f"the receipt {path}"
        value = strictjson.parse_object(raw, what, rule=RULE, limit=_LARGEST)
        try:
            blobs = blobs_of_task(task, [Digest.parse(one["digest"]) for one in value["blobs"]])
        except (KeyError, TypeError, ValueError):
            blobs = []
        if raw != self._encode(task, blobs):
            raise DocumentError(
                f"{what} is not that of task {task.number} (rule {RULE})",
                rule=RULE,
                path=str(path),
                hint="Run blobstore work to make it again.",
            )
        return blobs

    def unfinished_tasks(
        self,
        tasks: Iterable[Task],
        session: Session,
        store: Home,
        *,
        verify: bool = False,
        jobs: int = 1,
    ) -> list[Task]:
        """Return the tasks without a sound receipt, or whose blobs the store does not have.

        Raises: StorageError.
        """
        unfinished = []
        for task in tasks:
            try:
                blobs = self.read_receipt(task)
            except DocumentError as error:
                _log.warning("%s", error)
                blobs = None
            if blobs is None or lost_among(
                blobs, session, store, verify=verify, jobs=jobs, headers={}
            ):
                unfinished.append(task)
        return unfinished


def blobs_of_task(task: Task, digests: Iterable[Digest]) -> list[Descriptor]:
    """Return the blobs of a task, which have these digests. Raises: ValueError for other counts."""
    return [
        Descriptor(TENSOR_MEDIA_TYPE, digest, planned.size, name=planned.name)
        for planned, digest in zip(task.blobs, digests, strict=True)
    ]


def lost_among(
    blobs: Collection[Descriptor],
    session: Session,
    store: Home,
    *,
    verify: bool,
    jobs: int,
    headers: Mapping[str, bytes],
    progress: Progress = no_progress,
) -> set[Digest]:
    """Return the digests of those of ``blobs`` that are neither published nor kept by a session.

    Sizes are checked; with ``verify``, ``jobs`` threads also hash them, and a blob that does not
    begin with the one of ``headers`` for its name is lost: it is another of the same size. Raises:
    StorageError.
    """
    lost: set[Digest] = set()
    hidden = {blob.digest for blob in session.missing(blobs)}

    def is_sound(blob: Descriptor) -> bool:
        header = headers.get(blob.name or "", b"")
        if blob.digest in hidden:
            kept = session.recall(blob.digest.hex, blob.size, verify=verify)
            if kept is None or not header:
                return kept is not None
            with session.open(kept) as reader:
                return reader.read(0, len(header)) == header
        try:
            with store.blobs.open(blob) as reader:
                return reader.read(0, len(header)) == header and reader.digest() == blob.digest
        except BlobStoreError as error:
            _log.warning("blob %s can't be used: %s", blob.digest, error)
            return False

    def check(blob: Descriptor) -> None:
        if (verify or blob.digest in hidden) and not is_sound(blob):
            lost.add(blob.digest)
        progress(blob.size, blob.name or "")

    each(blobs, check, jobs, name="check")
    return lost


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkResult:
    """What a worker did: tasks of one shard of a plan, some of which may have been done before.

    Bytes are those of the tasks that were made: read from the source, and in blobs.
    """

    KEYS = (
        "plan",
        "shard=shard_text",
        "tasks",
        "made",
        "blobs",
        "source_bytes",
        "stored_bytes",
        "seconds",
    )

    plan: Annotated[Digest, "digest of the plan's file"]
    shard: tuple[int, int]
    tasks: Annotated[int, "tasks of the shard"]
    made: Annotated[int, "tasks that were done now"]
    blobs: Annotated[int, "blobs of these"]
    source_bytes: int
    stored_bytes: int
    seconds: float

    @property
    def shard_text(self) -> str:
        """I/N, counted from 0."""
        return f"{self.shard[0]}/{self.shard[1]}"


def work_on_plan(
    path: str | os.PathLike[str],
    *,
    shard: tuple[int, int] = (0, 1),
    store: Home | StorePlace = None,
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

    Raises: as `read_plan` and `import_model`; UsageError for a store that keeps no record of
    finished blobs.
    """
    started = time.monotonic()
    shared = SharedPlan.read(path, source=source, open_source=open_source)
    tasks = shard_of(shared.tasks, *shard)
    shown = start_progress(progress, sum(task.source_bytes for task in tasks))
    means = Means(jobs, memory, shown, verify=verify_reuse)
    made = do_tasks(shared, tasks, opened_store(store), means)
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


def do_tasks(shared: SharedPlan, tasks: Sequence[Task], store: Home, means: Means) -> list[Task]:
    """Do those of some tasks that are not done; return them. Raises: as `work_on_plan`."""
    done: list[Task] = []
    for group in batches(tasks, lambda task: task.source_bytes, _AT_ONCE):
        with store.session() as session:
            missing = shared.unfinished_tasks(
                group, session, store, verify=means.verify, jobs=means.jobs
            )
        nbytes = [sum(task.source_bytes for task in some) for some in (group, missing)]
        means.progress(nbytes[0] - nbytes[1], "")
        made = make_tasks(shared.plan, missing, store, means)
        for task, blobs in zip(missing, made, strict=True):
            shared.write_receipt(task, blobs)
        done += missing
    return done


def make_tasks(
    plan: ImportPlan, tasks: Sequence[Task], store: Home, means: Means
) -> list[list[Descriptor]]:
    """Return the blobs of each task, durable in the store. Raises: as `make_blobs`."""
    if not tasks:
        return []
    digests = iter(make_blobs(plan, [one for task in tasks for one in task.blobs], store, means))
    return [blobs_of_task(task, [next(digests) for _ in task.blobs]) for task in tasks]


def commit_plan(
    path: str | os.PathLike[str],
    name: str | ModelName | None = None,
    *,
    store: Home | StorePlace = None,
    source: Source | None = None,
    open_source: OpenSource = open_folder,
    verify: bool = False,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ImportResult:
    """Publish the model of the plan in a file, whose tasks are done, and return the import.

    The manifest is that of an import on one machine. Every receipt is read, and every blob is
    checked for presence and size; ``verify``: ``jobs`` threads hash them too. ``name``, ``force``:
    as `import_model`. A second commit of the same plan changes nothing.

    Raises: UnfinishedPlanError for tasks without a receipt, or whose blobs the store lost;
    DocumentError for a damaged receipt; as `work_on_plan` and `import_model`.
    """
    shared = SharedPlan.read(path, source=source, open_source=open_source)
    return commit_shared(
        shared,
        name,
        store=opened_store(store),
        verify=verify,
        jobs=jobs,
        force=force,
        progress=progress,
    )


def commit_shared(
    shared: SharedPlan,
    name: str | ModelName | None,
    *,
    store: Home,
    verify: bool = False,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ImportResult:
    """Publish the model of a plan. See `commit_plan`."""
    plan = shared.plan
    full = name_for(plan, name, force=force)
    receipts = {task.number: shared.read_receipt(task) for task in shared.tasks}
    if missing := [number for number, found in receipts.items() if found is None]:
        raise _unfinished_error(shared, missing, "are not done")
    blobs = {blob.name: blob for found in receipts.values() for blob in found or ()}
    shown = start_progress(progress, sum(blob.size for blob in blobs.values()))

    def find(session: Session) -> WrittenBlobs:
        headers = {blob.name: blob.header for blob in plan.blobs} if verify else {}
        lost = lost_among(
            list(blobs.values()),
            session,
            store,
            verify=verify,
            jobs=threads(jobs),
            progress=shown,
            headers=headers,
        )
        if lost:
            numbers = [
                number
                for number, found in receipts.items()
                if not lost.isdisjoint(blob.digest for blob in found or ())
            ]
            raise _unfinished_error(
                shared, numbers, "have lost or damaged blobs" if verify else "have lost blobs"
            )
        return [blobs[blob.name] for blob in plan.blobs], len(blobs)

    return publish_plan(plan, full, store, find)


def _unfinished_error(shared: SharedPlan, numbers: Sequence[int], what: str) -> UnfinishedPlanError:
    return UnfinishedPlanError(
        f"{len(numbers):,} of the {len(shared.tasks):,} tasks of {shared.path} {what}:"
        f" {shortened(numbers, _MOST_NAMED)}",
        path=shared.path,
        tasks=tuple(numbers),
        hint=f"blobstore work {shared.path} does them.",
    )
