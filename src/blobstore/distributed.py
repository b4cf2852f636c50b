"""Imports on a Dask cluster (extra ``dask``): its workers do the tasks of a plan.

The client plans, hands out tasks, keeps their receipts, and publishes the model. A task is sent as
a small plan of its own, so a worker needs neither the whole plan nor a folder that the client
writes to: it needs the source and the store. State lies in receipts and blobs only. So workers may
come, go and die, and the scheduler may be restarted: the client hands out again what was lost.
"""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Unpack
from uuid import uuid4

from blobstore.errors import (
    BlobStoreError,
    RemoteError,
    UsageError,
)
from blobstore.formats.documents import Descriptor
from blobstore.importer.model_names import check_tag, default_name
from blobstore.importer.planning.document import encode_plan
from blobstore.importer.planning.outputs import ImportPlan
from blobstore.importer.planning.travel import plan_bytes, read_plan
from blobstore.importer.policies.arguments import ImportArguments
from blobstore.importer.run import ImportResult, plan_import
from blobstore.importer.work.dask_worker import SentPortion, WorkOrder, make_blobs
from blobstore.importer.work.publishing import commit_shared
from blobstore.importer.work.tasks import Task
from blobstore.importer.work.worker import MadeTask, SharedPlan
from blobstore.importer.writing import least_memory
from blobstore.io.workers import Progress, begun
from blobstore.names import Digest, ModelName
from blobstore.source.addresses import OpenSource, Source, open_folder
from blobstore.store.ports import Home

if TYPE_CHECKING:
    from distributed import Client, Future

_SCHEME: Final = "dask://"
Group: TypeAlias = tuple[Task, ...]
"""Tasks that are done together, as one task of Dask."""
_WAITING_A_WORKER = 3
_WAITING = 32
"""Groups that the scheduler has at once, beside those of each worker: enough that no worker waits,
and that an adaptive cluster sees work for more workers, and few enough that the scheduler's memory
does not grow with the plan."""
_UNKNOWN_WORKERS = 16
"""Of a cluster that has not started workers yet."""
_GROUP_BYTES = 2**30
_GROUP_TASKS = 64
_PORTIONS = 2
"""A group is what a worker would get if so many were left for each worker."""
_LEAST_PORTIONS = 10
"""The last groups are what a worker would get if so many were made for each worker in all."""
_MOST_DEATHS = 10
"""How often a task is handed out again after its workers, or the scheduler, were lost."""


def import_model(
    source: Source | None = None,
    name: str | ModelName | None = None,
    *,
    client: Client,
    store: Home,
    plan: str | os.PathLike[str] | None = None,
    memory: int | None = None,
    retries: int = 3,
    progress: Progress | None = None,
    force: bool = False,
    open_source: OpenSource = open_folder,
    **options: Unpack[ImportArguments],
) -> ImportResult:
    """Import a checkpoint as `blobstore.import_model`, by the workers of a Dask cluster.

    The result is the same. The workers and the client have to reach ``source`` and ``store`` under
    the same names. ``plan``: a plan's file that is carried out instead of ``source``; its receipts
    are kept beside it, so that the same call goes on after the client was killed. ``memory``: bytes
    that each thread of a worker works in (None: as many as `import_model` takes, or half of what
    the worker may use). ``retries``: how often a task is repeated after an error that may pass.
    ``open_source`` opens addresses, on the workers too: a function that can be pickled.

    Raises: as `blobstore.import_model`; RemoteError if the cluster is lost, or workers die of one
    task again and again.
    """
    made = (
        plan_import(source, progress=progress, open_source=open_source, **options)
        if plan is None
        else read_plan(plan, source=source, open_source=open_source)
    )
    return run_plan_on(
        client,
        made,
        name,
        store,
        path=plan,
        memory=memory,
        retries=retries,
        progress=progress,
        force=force,
        open_source=open_source,
    )


def run_plan_on(
    client: Client,
    plan: ImportPlan,
    name: str | ModelName | None,
    store: Home,
    *,
    path: str | os.PathLike[str] | None = None,
    memory: int | None = None,
    retries: int = 3,
    progress: Progress | None = None,
    force: bool = False,
    open_source: OpenSource = open_folder,
) -> ImportResult:
    """Carry out a plan on a cluster, and publish its model. See `import_model`.

    ``path``: of the plan's file, if it has one; the receipts are kept beside it.
    """
    with tempfile.TemporaryDirectory(prefix="blobstore-") as folder:
        raw = encode_plan(plan) if path is None else plan_bytes(path)
        place = Path(folder, "plan.json") if path is None else path
        shared = SharedPlan.of(plan, Digest.of(raw), place)
        del raw  # it may have 512 MiB
        return _run(
            client, shared, name, store, memory, retries, progress, open_source, force=force
        )


def _run(
    client: Client,
    shared: SharedPlan,
    name: str | ModelName | None,
    store: Home,
    memory: int | None,
    retries: int,
    progress: Progress | None,
    open_source: OpenSource,
    *,
    force: bool,
) -> ImportResult:
    started = time.monotonic()
    plan = shared.divided.plan
    full = ModelName.of(default_name(plan) if name is None else name)
    if not force:
        check_tag(plan, full)
    _check_memory(memory)
    tasks = shared.unfinished(store)
    shared.receipts.make()
    shown = begun(progress, sum(task.source_bytes for task in tasks))
    order = WorkOrder(store, open_source, memory)

    def submit(group: Group, key: str) -> Future[Any]:
        portion = shared.divided.portion(group)
        sent = SentPortion(zlib.compress(encode_plan(portion.plan), 1), portion.declared, order)
        return client.submit(make_blobs, sent, key=key, retries=retries, pure=False)

    for task, made in HandingOut(client, submit).results(tasks):
        shared.receipts.write(task, made)
        shown(task.source_bytes, task.blobs[0].name)
    result = commit_shared(shared, full, store=store, force=force)
    return replace(result, seconds=time.monotonic() - started)


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """Connect to the scheduler at ``dask://HOST:PORT``, or any address that Dask knows.

    Raises: UsageError without the extra ``dask``; RemoteError if the scheduler can't be reached.
    """
    try:
        from distributed import Client
    except ImportError as error:
        hint = 'Install the extra: pip install "blobstore[dask]".'
        raise UsageError("Dask is not installed", hint=hint) from error
    place = address.removeprefix(_SCHEME)
    try:
        client = Client(
            place if "://" in place else f"tcp://{place}", timeout=10, set_as_default=False
        )
    except (OSError, ValueError) as error:
        raise RemoteError(
            f"the Dask scheduler at {address} can't be reached: {error}", path=address
        ) from error
    with client:
        yield client


def _check_memory(memory: int | None) -> None:
    if memory is not None and memory < least_memory(1):
        raise UsageError(
            f"a task can't work in {memory:,} bytes", hint=f"Give it {least_memory(1):,}."
        )


@dataclass(slots=True)
class HandingOut:
    """Hands out groups of tasks, some at a time.

    Groups are large at first, which saves time, and small at last, so that all workers end
    together. ``submit`` takes a group and the key of its future. Keys are never those of another
    import: Dask would take its groups, or what it made in another store, for these.
    """

    client: Client
    submit: Callable[[Group, str], Future[Any]]
    _prefix: str = field(default_factory=lambda: f"blobstore-{uuid4().hex}")
    _losses: Counter[int] = field(default_factory=Counter)
    _waiting: dict[Future[Any], Group] = field(default_factory=dict)
    _left: deque[Task] = field(default_factory=deque)
    _workers: int = _UNKNOWN_WORKERS
    _left_bytes: int = 0
    _all_bytes: int = 0

    def results(self, tasks: Sequence[Task]) -> Iterator[MadeTask]:
        """Yield each task with what it became, as they are done. Raises: the error of one."""
        from distributed import as_completed

        done = as_completed(loop=self.client.loop)
        self._left = deque(tasks)
        self._left_bytes = self._all_bytes = sum(task.source_bytes for task in tasks)
        try:
            self._fill(done)
            for future in done:
                group = self._waiting.pop(future)
                made = self._result(future, group)
                if made is None:
                    done.add(self._hand_out(group))
                    continue
                self._fill(done)
                yield from _split(group, made)
        finally:
            if self._waiting:
                self.client.cancel(list(self._waiting), force=True)

    def _fill(self, done: Any) -> None:
        """Hand out tasks until no worker of the cluster will wait."""
        if not self._left:
            return
        workers = self._count_workers()
        while self._left and len(self._waiting) < _WAITING + _WAITING_A_WORKER * workers:
            done.add(self._hand_out(self._next_group(workers)))

    def _count_workers(self) -> int:
        """Return how many workers there are, or were before they and the scheduler were lost."""
        with suppress(OSError):  # the scheduler was killed: another one may take its place
            self._workers = len(self.client.nthreads()) or self._workers
        return self._workers

    def _next_group(self, workers: int) -> Group:
        portions = (self._left_bytes / _PORTIONS, self._all_bytes / _LEAST_PORTIONS)
        most = min(max(portions) / workers, _GROUP_BYTES)
        group: list[Task] = []
        nbytes = 0
        while self._left and len(group) < _GROUP_TASKS:
            nbytes += self._left[0].source_bytes
            if group and nbytes > most:
                break
            group.append(self._left.popleft())
        self._left_bytes -= sum(task.source_bytes for task in group)
        return tuple(group)

    def _hand_out(self, group: Group) -> Future[Any]:
        number = group[0].number
        future = self.submit(group, f"{self._prefix}-{number}-{self._losses[number]}")
        self._waiting[future] = group
        return future

    def _result(self, future: Future[Any], group: Group) -> list[Descriptor] | None:
        """Return what a group became, None if it has to be handed out again."""
        if future.status == "finished":
            try:
                found: list[Descriptor] | BlobStoreError | None = future.result()
            except OSError:  # its scheduler was killed before the result came
                found = None
            future.release()
            if isinstance(found, BlobStoreError):
                raise found
            if found is not None:
                return found
        self._check_lost(future, group[0].number)
        self._losses[group[0].number] += 1
        return None

    def _check_lost(self, future: Future[Any], number: int) -> None:
        """Raise unless a group was lost with its worker or the scheduler, and not too often."""
        from distributed import KilledWorker

        error = future.exception() if future.status == "error" else None
        if isinstance(error, BlobStoreError):
            raise error
        if self.client.status in ("closed", "closing"):
            raise RemoteError("the Dask scheduler is gone", temporary=True)
        if error is not None and not isinstance(error, KilledWorker):
            raise RemoteError(f"a Dask worker failed: {type(error).__name__}: {error}") from error
        if self._losses[number] >= _MOST_DEATHS:
            raise RemoteError(f"the Dask workers of task {number} died {_MOST_DEATHS} times")


def _split(group: Group, made: list[Descriptor]) -> Iterator[MadeTask]:
    """Yield each task of a group with what it became."""
    blobs = iter(made)
    for task in group:
        yield MadeTask(task, list(islice(blobs, len(task.blobs))))
