"""On a Dask worker: one task makes blobs at a time, with all threads of the worker.

It needs the source and the store, and neither the whole plan nor its receipts. Errors that stay are
returned, because Dask repeats tasks that raise. `blobstore.distributed` is the client's half.
"""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass

from blobstore.errors import BlobStoreError, RemoteError, StorageError, UsageError
from blobstore.formats.documents import Descriptor
from blobstore.importer.planning.travel import decode_plan
from blobstore.importer.work.tasks import DividedPlan, PlanPortion
from blobstore.importer.work.worker import TaskMaker
from blobstore.importer.writing import least_memory, usual_memory
from blobstore.names import Digest
from blobstore.source.addresses import OpenSource
from blobstore.store.ports import Home

_turn = threading.Lock()
"""Held by the one task of a worker process that makes blobs, with all threads of the worker: tasks
beside each other would wait for Python's lock."""


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """What all tasks share."""

    store: Home
    open_source: OpenSource
    memory: int | None


@dataclass(frozen=True, slots=True)
class SentPortion:
    """A `PlanPortion` that is sent: ``document`` is its plan, compressed."""

    document: bytes
    declared: tuple[Digest | None, ...]
    order: WorkOrder


def make_blobs(sent: SentPortion) -> list[Descriptor] | BlobStoreError:
    """Make the blobs of a small plan, on a worker; return them, or an error that stays.

    Raises: an error that may pass; Dask repeats the task then.
    """
    try:
        order = sent.order
        plan = decode_plan(
            zlib.decompress(sent.document), "that was handed out", open_source=order.open_source
        )
        portion = PlanPortion(plan, sent.declared)
        portion.check()
        threads, memory = _means(order.memory)
        _stop_profiler()
        maker = TaskMaker(DividedPlan(plan), order.store, threads, memory, verify=False)
        with _turn:
            ((_, blobs),) = maker.make([portion.task], {0: ()})
    except (StorageError, RemoteError) as error:
        if getattr(error, "temporary", True):
            raise
        return error.kept()
    except BlobStoreError as error:
        return error.kept()
    return blobs


def _stop_profiler() -> None:
    """Stop Dask's profiler in this worker, before threads are started.

    It asks the interpreter for the frames of all threads. In CPython 3.11.7 that call can wait for
    a thread that is being started, which waits for the interpreter's lock: the worker hangs
    (python/cpython issue 106883, which 3.12 does not have).
    """
    from distributed import get_worker

    worker = get_worker()
    profiler = worker.periodic_callbacks.get("profile")
    if profiler is None or not profiler.is_running():
        return
    stopped = threading.Event()

    def stop() -> None:
        profiler.stop()
        stopped.set()

    worker.loop.add_callback(stop)
    stopped.wait()


def _means(asked: int | None) -> tuple[int, int]:
    """Return the threads of this worker, and the bytes that a task works in with all of them.

    Raises: UsageError if the worker has too little memory for its threads.
    """
    from distributed import get_worker

    worker = get_worker()
    limit, threads = worker.memory_manager.memory_limit, worker.state.nthreads
    if not limit:
        return threads, threads * asked if asked else usual_memory(threads)
    most = limit // (2 * threads)
    if most < max(asked or 0, least_memory(1)):
        raise UsageError(
            f"the Dask worker {worker.name} may use {limit:,} bytes, and has {threads} threads",
            hint=f"Give it {2 * threads * max(asked or 0, least_memory(1)):,}, or fewer threads.",
        )
    return threads, threads * asked if asked else min(usual_memory(threads), threads * most)
