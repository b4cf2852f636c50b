"""Commit: the model of a plan whose tasks are done is published, once, from their receipts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from blobstore.errors import UnfinishedPlanError
from blobstore.formats.documents import Descriptor
from blobstore.importer.model_names import check_tag, default_name
from blobstore.importer.recalling import WrittenBlobs
from blobstore.importer.run import ImportResult, publish_plan
from blobstore.importer.work.tasks import Task
from blobstore.importer.work.worker import SharedPlan, lost_among
from blobstore.io.workers import Progress, begun, threads
from blobstore.names import ModelName
from blobstore.source.addresses import OpenSource, Source, open_folder
from blobstore.store.ports import Home, Session

_MOST_NAMED = 10


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
    plan = shared.divided.plan
    full = ModelName.of(default_name(plan) if name is None else name)
    if not force:
        check_tag(plan, full)
    blobs = made_blobs(shared)
    shown = begun(progress, sum(blob.size for blob in blobs.values()))

    def find(session: Session) -> WrittenBlobs:
        workers = threads(jobs) if verify else 1
        check_blobs(shared, blobs, session, store, workers, shown, verify=verify)
        return WrittenBlobs([blobs[blob.name] for blob in plan.blobs], len(blobs))

    return publish_plan(plan, full, store, find)


def made_blobs(shared: SharedPlan) -> dict[str, Descriptor]:
    """Return the blobs that the receipts name, by the name of the planned blob.

    Raises: UnfinishedPlanError for missing receipts; as `ReceiptFolder.read`.
    """
    found: dict[str, Descriptor] = {}
    missing = []
    for task in shared.divided.tasks:
        blobs = shared.receipts.read(task)
        if blobs is None:
            missing.append(task)
            continue
        found |= {planned.name: blob for planned, blob in zip(task.blobs, blobs, strict=True)}
    if missing:
        raise _unfinished(shared, missing, "are not done")
    return found


def check_blobs(
    shared: SharedPlan,
    blobs: Mapping[str, Descriptor],
    session: Session,
    store: Home,
    workers: int,
    progress: Progress,
    *,
    verify: bool,
) -> None:
    """Raise UnfinishedPlanError unless the store has all blobs."""
    lost = lost_among(
        list(blobs.values()),
        session,
        store,
        verify=verify,
        jobs=workers,
        progress=progress,
        headers={blob.name: blob.header for blob in shared.divided.plan.blobs} if verify else {},
    )
    if lost:
        tasks = [
            task
            for task in shared.divided.tasks
            if any(blobs[blob.name].digest in lost for blob in task.blobs)
        ]
        what = "have lost or damaged blobs" if verify else "have lost blobs"
        raise _unfinished(shared, tasks, what)


def _unfinished(shared: SharedPlan, tasks: Sequence[Task], what: str) -> UnfinishedPlanError:
    numbers = [task.number for task in tasks]
    named = ", ".join(map(str, numbers[:_MOST_NAMED]))
    more = len(numbers) - _MOST_NAMED
    shown = f"{named} and {more:,} more" if more > 0 else named
    total = len(shared.divided.tasks)
    return UnfinishedPlanError(
        f"{len(numbers):,} of the {total:,} tasks of {shared.path} {what}: {shown}",
        path=shared.path,
        tasks=tuple(numbers),
        hint=f"blobstore work {shared.path} does them.",
    )
