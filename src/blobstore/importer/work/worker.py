"""Work and commit: workers make the blobs of tasks, and one commit publishes the model.

A worker leaves blobs in the store, and then writes the receipts of their tasks. A task with a
receipt is done if the store still has its blobs. Without one, the store's journal may know them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from blobstore.errors import UnfinishedPlanError, UsageError
from blobstore.formats.documents import Descriptor
from blobstore.importer.model_names import check_tag, default_name
from blobstore.importer.planning.outputs import ImportPlan
from blobstore.importer.recalling import WrittenBlobs
from blobstore.importer.run import ImportResult, publish_plan, working_memory
from blobstore.importer.work.shared_plan import SharedPlan, described, lost_among
from blobstore.importer.work.tasks import Task, grouped, shard_of
from blobstore.importer.writing import write_blobs
from blobstore.io.workers import Progress, begun, silent, threads
from blobstore.names import Digest, ModelName
from blobstore.source.addresses import OpenSource, Source, open_folder
from blobstore.store.ports import Home, Session

_AT_ONCE: Final = 2**30
"""Bytes of the source of tasks that are made together, and made durable once."""
_MOST_NAMED: Final = 10


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
    shared = SharedPlan.read(path, source=source, open_source=open_source)
    tasks = shard_of(shared.tasks, *shard)
    shown = begun(progress, sum(task.source_bytes for task in tasks))
    made = do_tasks(shared, tasks, store, jobs, memory, shown, verify_reuse=verify_reuse)
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


def do_tasks(
    shared: SharedPlan,
    tasks: Sequence[Task],
    store: Home,
    jobs: int | None = None,
    memory: int | None = None,
    progress: Progress = silent,
    *,
    verify_reuse: bool = False,
) -> list[Task]:
    """Do those of some tasks that are not done; return them. Raises: as `work_on_plan`."""
    workers = threads(jobs)
    budget = working_memory(memory, workers)
    done: list[Task] = []
    for group in grouped(tasks, _AT_ONCE):
        with store.session(shared.plan.inventory.folder.key) as session:
            missing = shared.unfinished(group, session, store, verify=verify_reuse, jobs=workers)
            nbytes = [sum(task.source_bytes for task in tasks) for tasks in (group, missing)]
            progress(nbytes[0] - nbytes[1], "")
            made = make_tasks(
                shared.plan, missing, session, workers, budget, progress, verify_reuse=verify_reuse
            )
        for task, blobs in zip(missing, made, strict=True):  # they are durable now
            shared.write_receipt(task, blobs)
        done += missing
    return done


def make_tasks(
    plan: ImportPlan,
    tasks: Sequence[Task],
    session: Session,
    jobs: int,
    memory: int,
    progress: Progress = silent,
    *,
    verify_reuse: bool = False,
) -> list[list[Descriptor]]:
    """Return the blobs of each task. They are durable when the session has ended.

    Raises: UsageError for a store that does not remember what was made; as `write_blobs`.
    """
    if not session.remembers:
        raise UsageError(
            "the store does not remember what was made",
            hint="Work in a store in a folder, or in a bucket.",
        )
    if not tasks:
        return []
    layers = tuple(blob for task in tasks for blob in task.blobs)
    only = replace(plan, layers=layers)
    written = write_blobs(only, session, jobs, memory, progress, verify_reuse=verify_reuse)
    session.keep()
    digests = iter([blob.digest for blob in written.blobs])
    return [described(task, [next(digests) for _ in task.blobs]) for task in tasks]


def commit_plan(
    path: str | os.PathLike[str],
    name: str | ModelName | None = None,
    *,
    store: Home,
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
        shared, name, store=store, verify=verify, jobs=jobs, force=force, progress=progress
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
    full = ModelName.of(default_name(plan) if name is None else name)
    if not force:
        check_tag(plan, full)
    receipts = {task.number: shared.read_receipt(task) for task in shared.tasks}
    if missing := [number for number, found in receipts.items() if found is None]:
        raise _unfinished(shared, missing, "are not done")
    blobs = {blob.name: blob for found in receipts.values() for blob in found or ()}
    shown = begun(progress, sum(blob.size for blob in blobs.values()))

    def find(session: Session) -> WrittenBlobs:
        headers = {blob.name: blob.header for blob in plan.blobs} if verify else {}
        lost = lost_among(
            list(blobs.values()),
            session,
            store,
            verify=verify,
            jobs=threads(jobs) if verify else 1,
            progress=shown,
            headers=headers,
        )
        if lost:
            numbers = [
                number
                for number, found in receipts.items()
                if not lost.isdisjoint(blob.digest for blob in found or ())
            ]
            what = "have lost or damaged blobs" if verify else "have lost blobs"
            raise _unfinished(shared, numbers, what)
        return WrittenBlobs([blobs[blob.name] for blob in plan.blobs], len(blobs))

    return publish_plan(plan, full, store, find)


def _unfinished(shared: SharedPlan, numbers: Sequence[int], what: str) -> UnfinishedPlanError:
    named = ", ".join(map(str, numbers[:_MOST_NAMED]))
    more = len(numbers) - _MOST_NAMED
    shown = f"{named} and {more:,} more" if more > 0 else named
    return UnfinishedPlanError(
        f"{len(numbers):,} of the {len(shared.tasks):,} tasks of {shared.path} {what}: {shown}",
        path=shared.path,
        tasks=tuple(numbers),
        hint=f"blobstore work {shared.path} does them.",
    )
