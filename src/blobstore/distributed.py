"""Imports on a Dask cluster (extra ``dask``): its workers do the tasks of a plan.

The client plans, maps the tasks over the cluster, keeps their receipts, and publishes the model. A
worker needs the source and the store: it plans again, once, and checks that the plan is the
client's. Receipts and blobs are the only state. So workers may start, stop and die, and the
scheduler may be restarted: what was lost is mapped again.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack
from uuid import uuid4

from blobstore.errors import BlobStoreError, RemoteError, UsageError, needs
from blobstore.formats.documents import Descriptor
from blobstore.importer.arguments import ImportArguments
from blobstore.importer.outputs import ImportPlan
from blobstore.importer.planfile import decode_plan, encode_plan, plan_bytes, read_plan
from blobstore.importer.run import ImportResult, name_for, plan_import
from blobstore.importer.worker import SharedPlan, Task, commit_shared, make_tasks, tasks_of
from blobstore.importer.writing import Means, least_memory, usual_memory
from blobstore.io.workers import Progress, start_progress
from blobstore.names import Digest, ModelName
from blobstore.source.addresses import OpenSource, Source, open_folder
from blobstore.store.ports import Home

if TYPE_CHECKING:
    from distributed import Client


# How often tasks are mapped, if workers or the scheduler are lost.
_ATTEMPTS = 10


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
    are kept with it, so that the same call goes on after the client was killed. ``memory``: bytes
    that each thread of a worker works in (None: as many as `import_model` takes, or half of what
    the worker may use). ``retries``: how often a task is repeated after an error. ``open_source``
    opens addresses, on the workers too: a function that can be pickled.

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
        name_for(made, name, force=force),
        store,
        path=plan,
        memory=memory,
        retries=retries,
        progress=progress,
        open_source=open_source,
    )


def run_plan_on(
    client: Client,
    plan: ImportPlan,
    name: ModelName,
    store: Home,
    *,
    path: str | os.PathLike[str] | None = None,
    memory: int | None = None,
    retries: int = 3,
    progress: Progress | None = None,
    open_source: OpenSource = open_folder,
) -> ImportResult:
    """Carry out a plan on a cluster, and publish its model, whatever its tag. See `import_model`.

    ``path``: of the plan's file, if it has one; the receipts are kept with it.
    """
    started = time.monotonic()
    Means(1, memory)  # which raises if a thread can't work in so few bytes
    sent = encode_plan(plan)  # with the source's address now
    with tempfile.TemporaryDirectory(prefix="blobstore-") as folder:
        shared = SharedPlan(
            plan,
            os.fspath(path or Path(folder, "plan.json")),
            Digest.of(sent if path is None else plan_bytes(path)),
        )
        how = {
            "import_key": uuid4().hex,
            "sent": sent,
            "store": store,
            "open_source": open_source,
            "memory": memory,
        }
        _make_all(client, shared, store, retries, progress, how)
        result = commit_shared(shared, name, store=store, force=True)
    return replace(result, seconds=time.monotonic() - started)


def _make_all(
    client: Client,
    shared: SharedPlan,
    store: Home,
    retries: int,
    progress: Progress | None,
    how: dict[str, Any],
) -> None:
    """Do all tasks, and write their receipts. Raises: the error of one; RemoteError."""
    from distributed import KilledWorker

    shown = None
    lost: Exception | None = None
    for attempt in range(_ATTEMPTS):
        time.sleep(attempt)  # a scheduler that is restarted takes some time
        with store.session() as session:
            tasks = shared.unfinished_tasks(shared.tasks, session, store)
        shown = shown or start_progress(progress, sum(task.source_bytes for task in tasks))
        try:
            for task, blobs in _made(client, tasks, retries, how):
                shared.write_receipt(task, blobs)
                shown(task.source_bytes, task.blobs[0].name)
        except BlobStoreError:
            raise
        except (CancelledError, KilledWorker, OSError) as error:
            lost = error
        except Exception as error:
            raise RemoteError(f"a Dask worker failed: {type(error).__name__}: {error}") from error
        else:
            return
        if client.status in ("closed", "closing"):
            raise RemoteError("the Dask scheduler was lost", temporary=True) from lost
    raise RemoteError(f"Dask workers, or their scheduler, were lost {_ATTEMPTS} times") from lost


def _made(
    client: Client, tasks: list[Task], retries: int, how: dict[str, Any]
) -> Iterator[tuple[Task, list[Descriptor]]]:
    from distributed import as_completed

    futures = client.map(
        make_task, [task.number for task in tasks], retries=retries, pure=False, **how
    )
    places = dict(zip(futures, tasks, strict=True))
    try:
        for future in as_completed(futures, loop=client.loop):
            made = future.result()
            future.release()
            yield places[future], made
    finally:
        with suppress(OSError):
            client.cancel(futures, force=True)


@contextmanager
def connect(address: str) -> Iterator[Client]:
    """Connect to the scheduler at ``dask://HOST:PORT``, or any address that Dask knows.

    Raises: UsageError without the extra ``dask``; RemoteError if the scheduler can't be reached.
    """
    with needs("dask", "Dask is not installed"):
        from distributed import Client
    place = address.removeprefix("dask://")
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


# Locked by the one task of a worker process that makes blobs, with all of its threads: two tasks
# would wait for Python's lock.
_turn = threading.Lock()


def make_task(
    number: int,
    *,
    import_key: str,
    sent: bytes,
    store: Home,
    open_source: OpenSource,
    memory: int | None,
) -> list[Descriptor]:
    """On a worker: make the blobs of the task of this number, and return them."""
    means = _means(memory)
    with _turn:
        _stop_profiler()
        plan, tasks = _plan_again(import_key, sent, open_source)
        return make_tasks(plan, [tasks[number]], store, means)[0]


# On a worker: the plan of the last import, by the import's key.
_plans: dict[str, tuple[ImportPlan, tuple[Task, ...]]] = {}


def _plan_again(
    key: str, sent: bytes, open_source: OpenSource
) -> tuple[ImportPlan, tuple[Task, ...]]:
    if key not in _plans:
        _plans.clear()
        plan = decode_plan(sent, "of the client", open_source=open_source)
        _plans[key] = plan, tasks_of(plan)
    return _plans[key]


def _stop_profiler() -> None:
    """Stop Dask's profiler in this worker, before threads are started.

    It asks the interpreter for the frames of all threads. In CPython 3.11.7 that call can wait for
    a thread that is being started, which waits for the interpreter's lock: the worker hangs
    (python/cpython issue 106883, which 3.12 does not have).
    """
    from distributed import get_worker

    worker = get_worker()
    profiler = worker.periodic_callbacks.pop("profile", None)
    if profiler is not None:
        stopped = threading.Event()
        worker.loop.add_callback(profiler.stop)
        worker.loop.add_callback(stopped.set)  # callbacks run in their order
        stopped.wait()


def _means(asked: int | None) -> Means:
    """Return the threads of this worker, and the bytes that a task works in with all of them.

    Raises: UsageError if the worker has too little memory for its threads.
    """
    from distributed import get_worker

    worker = get_worker()
    limit, threads = worker.memory_manager.memory_limit, worker.state.nthreads
    needed = 2 * threads * max(asked or 0, least_memory(1))
    if limit and limit < needed:
        raise UsageError(
            f"the Dask worker {worker.name} may use {limit:,} bytes, for {threads} threads",
            hint=f"Give it {needed:,} bytes, or fewer threads.",
        )
    usual = usual_memory(threads)
    return Means(threads, threads * asked if asked else min(usual, limit // 2 if limit else usual))
