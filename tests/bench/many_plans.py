"""Plans of up to a million blobs, handed out to a scheduler: time, and the scheduler's memory.

The blobs and the workers' receipts are made up; everything between them is what an import does.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed import Client, Future
from support.inventories import inventory, source_tensor
from tables import show, table

from blobstore import distributed as on_dask
from blobstore.formats.coverage import Coverage, Tally
from blobstore.formats.documents import Descriptor, ModelConfig
from blobstore.formats.quant import Quantization, QuantType
from blobstore.importer.planning.document import encode_plan
from blobstore.importer.planning.outputs import ImportPlan, OutputTensor, PlannedBlob
from blobstore.importer.policies.options import ImportOptions
from blobstore.importer.work.publishing import check_blobs, made_blobs
from blobstore.importer.work.worker import SharedPlan
from blobstore.io.workers import silent
from blobstore.names import Digest
from blobstore.source.weights import SourceWeight

_FILES = 200


def made_up_plan(count: int) -> ImportPlan:
    """Return a plan of ``count`` blobs of 64 x 64 weights, in 200 files."""
    kind = Quantization(QuantType.INT4, 32)
    found = inventory(source_tensor(f"w.{number:07}.weight", 64, 64) for number in range(count))
    (file,) = found.files
    files = tuple(replace(file, name=f"{n}.st", path=f"/m/{n}.st") for n in range(_FILES))
    tensors = {
        name: replace(tensor, file=files[number * _FILES // count], offset=number * 8192)
        for number, (name, tensor) in enumerate(found.tensors.items())
    }
    options = ImportOptions(quant_type=QuantType.INT4)
    blobs = tuple(
        PlannedBlob.of(
            name,
            [OutputTensor(name, (SourceWeight.plain(one),), one.dtype, one.shape, kind)],
            options,
        )
        for name, one in tensors.items()
    )
    nothing = Tally(0, 0)
    inventories = (replace(found, files=files, tensors=tensors),)
    return ImportPlan(inventories, options, blobs, ModelConfig(), Coverage(nothing, nothing))


def made_up_task(document: bytes, sizes: Sequence[int]) -> list[Descriptor]:
    """Return blobs of these sizes, with digests that depend on the document."""
    start = hashlib.sha256(document).hexdigest()[:56]
    return [
        Descriptor("", Digest(f"{start}{number:08x}"), size) for number, size in enumerate(sizes)
    ]


class _FullSession:
    """A session of a store that has every blob."""

    earlier = None

    def missing(self, descriptors: Collection[Descriptor]) -> list[Descriptor]:
        """Return nothing."""
        return []


@contextmanager
def far_cluster(folder: Path) -> Iterator[Client]:
    """Start a scheduler and two workers, each in a process of its own."""
    place = folder / "scheduler.json"
    common = ["--scheduler-file", str(place)]
    start = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--nthreads", "1"]
    here = os.pathsep.join(filter(None, sys.path))
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    quiet["env"] = {**os.environ, "PYTHONPATH": here}  # all of them import this module
    processes = [subprocess.Popen([*start, *common, "--port", "0", "--no-dashboard"], **quiet)]
    try:
        processes += [
            subprocess.Popen([*worker, *common, "--no-dashboard", "--no-nanny"], **quiet)
            for _ in range(2)
        ]
        with Client(scheduler_file=str(place)) as client:
            client.wait_for_workers(2)
            yield client
    finally:
        for process in processes:
            process.kill()
            process.wait()
        place.unlink(missing_ok=True)


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def plans(counts: Sequence[int], folder: Path) -> None:
    """Print a table with a row for each number of blobs."""
    table("blobs", "tasks", "divide s", "hand out s", "commit s", "µs a blob", "scheduler MB")
    for count in counts:
        plan = made_up_plan(count)
        path = folder / f"{count}.json"
        started = time.monotonic()
        shared = SharedPlan.of(plan, Digest.of(str(count).encode()), path)
        tasks = shared.divided.tasks
        divided = time.monotonic()
        with far_cluster(folder) as client:
            connected = time.monotonic()
            _hand_out(shared, client)
            handed = time.monotonic()
            scheduler_mb = client.run_on_scheduler(_peak_mb)
        before = time.monotonic()
        blobs = made_blobs(shared)
        check_blobs(shared, blobs, _FullSession(), None, 1, silent, verify=False)  # type: ignore[arg-type]
        committed = time.monotonic()
        seconds = [divided - started, handed - connected, committed - before]
        a_blob = 1e6 * sum(seconds) / count
        show(
            [
                f"{count:,}",
                f"{len(tasks):,}",
                *(f"{took:.2f}" for took in seconds),
                f"{a_blob:.0f}",
                str(scheduler_mb),
            ]
        )
        shutil.rmtree(shared.receipts.path)


def _hand_out(shared: SharedPlan, client: Client) -> None:
    shared.receipts.make()

    def submit(group: on_dask.Group, key: str) -> Future[Any]:
        blobs = [blob for task in group for blob in task.blobs]
        document = zlib.compress(encode_plan(shared.divided.only(blobs)), 1)
        sizes = [blob.size for blob in blobs]
        future: Future[Any] = client.submit(made_up_task, document, sizes, key=key)
        return future

    handing = on_dask.HandingOut(client, submit)
    for task, blobs in handing.results(shared.divided.tasks):
        shared.receipts.write(task, blobs)
