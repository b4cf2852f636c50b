"""Imports on Dask clusters of this machine: the model of one process, whatever is killed meanwhile.

The laboratory runs these; the long form kills 200 workers.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support import PYCODE_MOE, QUANT_TYPES
from support.many import sharded_checkpoint
from support.nginx import nginx

import blobstore.distributed
from blobstore.errors import CorruptDataError, RemoteError, UsageError
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # tornado and Dask leave sockets to the collector
]

_QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


class Cluster:
    """A scheduler and workers, each a process of its own that can be killed."""

    def __init__(self, folder: Path) -> None:
        self._place = folder / "scheduler.json"
        self._local = folder / "workers"
        self._port = "0"
        self._scheduler: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        self.start_scheduler()

    def start_scheduler(self) -> None:
        """Start a scheduler; after the first, at the address of the first."""
        import json

        self._place.unlink(missing_ok=True)
        command = ["distributed.cli.dask_scheduler", "--no-dashboard", "--no-jupyter"]
        more = ["--port", self._port, "--host", "127.0.0.1", "--scheduler-file", str(self._place)]
        self._scheduler = self._start([*command, *more])
        while True:
            with suppress(OSError, ValueError):
                self.address = json.loads(self._place.read_bytes())["address"]
                break
            assert self._scheduler.poll() is None
            time.sleep(0.05)  # its file is the only sign of life
        self._port = self.address.rpartition(":")[2]

    def kill_scheduler(self) -> None:
        assert self._scheduler is not None
        self._scheduler.kill()
        self._scheduler.wait()

    def start_worker(self, threads: int = 1, memory: str = "1GB") -> None:
        limits = ["--nthreads", str(threads), "--memory-limit", memory, "--no-nanny"]
        place = ["--local-directory", str(self._local), "--no-dashboard"]
        command = ["distributed.cli.dask_worker", self.address, *limits, *place]
        self.workers.append(self._start(command))

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", *command], **_QUIET)

    def kill_worker(self, number: int) -> None:
        worker = self.workers.pop(number)
        worker.send_signal(signal.SIGKILL)
        worker.wait()

    def close(self) -> None:
        for process in (*self.workers, self._scheduler):
            if process is not None:
                process.kill()
                process.wait()


@contextmanager
def cluster(folder: Path, workers: int = 0, threads: int = 1) -> Iterator[tuple[Cluster, Any]]:
    from distributed import Client

    found = Cluster(folder)
    try:
        for _ in range(workers):
            found.start_worker(threads)
        with Client(found.address, set_as_default=False) as client:
            yield found, client
    finally:
        found.close()


def alone(source: Path, quant: str = "int4") -> bytes:
    store = MemoryStore()
    return blobstore.import_model(source, "m", store=store, quant=quant).manifest.raw


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    with cluster(tmp_path, workers) as (_, client):
        for quant in QUANT_TYPES:
            store = Store(tmp_path / quant)
            seen: list[int] = []

            def note(nbytes: int, _name: str, seen: list[int] = seen) -> None:
                seen.append(nbytes)

            found = blobstore.distributed.import_model(
                PYCODE_MOE, "m", client=client, store=store, quant=quant, progress=note
            )
            assert found.manifest.raw == alone(PYCODE_MOE, quant)
            assert sum(seen) == found.source_bytes  # each byte once
            assert blobstore.verify(store).is_sound


def test_workers_that_come_later(tmp_path: Path) -> None:
    """An adaptive cluster starts workers when there is work, and may have none before."""
    source = sharded_checkpoint(tmp_path / "m", 8)
    with cluster(tmp_path) as (running, client):

        def start(_done: threading.Event) -> None:
            while not client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)):
                pass
            running.start_worker()

        found = _while_importing(
            start,
            lambda: blobstore.distributed.import_model(
                source, "m", client=client, store=Store(tmp_path / "store"), quant="int4"
            ),
        )
    assert found.manifest.raw == alone(source)


def test_an_adaptive_cluster(tmp_path: Path) -> None:
    """It has no worker at first, starts some for the import, and may retire them meanwhile."""
    from distributed import Client, LocalCluster

    source = sharded_checkpoint(tmp_path / "m", 8)
    with (
        LocalCluster(n_workers=0, threads_per_worker=1, dashboard_address=None) as local,
        Client(local, set_as_default=False) as client,
    ):
        local.adapt(minimum=0, maximum=4)
        found = blobstore.distributed.import_model(
            source, "m", client=client, store=Store(tmp_path / "store"), quant="int4"
        )
    assert found.manifest.raw == alone(source)


def test_the_command(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as (running, _):
        address = running.address.replace("tcp://", "dask://")
        store = ["--store", str(tmp_path / "store")]
        line = ["import", str(PYCODE_MOE), "m:int4", "--quant", "int4", "--on", address, *store]
        subprocess.run([sys.executable, "-m", "blobstore", *line], check=True, **_QUIET)
    assert Store(tmp_path / "store").manifest("m:int4").raw == alone(PYCODE_MOE)


def test_an_error_of_a_task_is_the_error_of_the_import(tmp_path: Path) -> None:
    source = sharded_checkpoint(tmp_path / "m", 4)
    plan = blobstore.plan_import(source)
    os.utime(next(source.glob("*-00003-*")), (1, 1))
    with (
        cluster(tmp_path, 1) as (_, client),
        pytest.raises(CorruptDataError, match="written to since the plan"),
    ):
        blobstore.distributed.run_plan_on(client, plan, "m", Store(tmp_path / "s"))
    assert not Store(tmp_path / "s").manifests.names()


def test_a_worker_with_too_little_memory(tmp_path: Path) -> None:
    with cluster(tmp_path) as (running, client):
        running.start_worker(threads=8, memory="250MB")
        with pytest.raises(UsageError, match="may use 250,000,000 bytes, and has 8 threads"):
            blobstore.distributed.import_model(
                PYCODE_MOE, "m", client=client, store=Store(tmp_path / "store")
            )


def test_a_scheduler_that_can_not_be_reached() -> None:
    from blobstore.distributed import connected

    with pytest.raises(RemoteError, match="can't be reached"), connected("dask://127.0.0.1:9"):
        pass


def _while_importing(act: Callable[[threading.Event], None], run: Callable[[], Any]) -> Any:
    """Return what ``run`` returns, while ``act`` disturbs it until the event is set."""
    done = threading.Event()
    thread = threading.Thread(target=act, args=(done,))
    thread.start()
    try:
        return run()
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.long)])
def test_workers_are_killed(kills: int, tmp_path: Path) -> None:
    """Imports go on until so many workers were killed; each gives the model of one process."""
    source = sharded_checkpoint(tmp_path / "m", 24)
    expected, random_ = alone(source), random.Random(17)
    killed = imports = 0
    with cluster(tmp_path, 4) as (running, client):

        def disturb(done: threading.Event) -> None:
            nonlocal killed
            while not done.wait(random_.uniform(0.02, 0.4)) and killed < kills:
                running.kill_worker(random_.randrange(4))
                running.start_worker()
                killed += 1

        while killed < kills:
            store = Store(tmp_path / f"store-{imports}")
            found = _while_importing(
                disturb,
                lambda store=store: blobstore.distributed.import_model(  # type: ignore[misc]
                    source, "m", client=client, store=store, quant="int4"
                ),
            )
            assert found.manifest.raw == expected
            assert blobstore.verify(store).is_sound
            imports += 1
    sys.stderr.write(f"{killed} workers killed in {imports} imports\n")


@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.long)])
def test_killed_workers_fetch_little_again(kills: int, tmp_path: Path) -> None:
    """Four workers are killed in each import, which reads at most the files of their tasks again.

    And headers. How much that is depends on the moments; docs/scale.md has what was measured.
    """
    source, random_ = sharded_checkpoint(tmp_path / "m", 24, scale=20), random.Random(18)
    sizes = sorted(file.stat().st_size for file in source.glob("*.safetensors"))
    nbytes, most = sum(sizes), 1 + sum(sizes[-4:]) / sum(sizes)
    read: list[float] = []
    with nginx(tmp_path / "nginx", tmp_path) as server, cluster(tmp_path, 4) as (running, client):

        def disturb(done: threading.Event) -> None:
            for _ in range(4):
                if done.wait(random_.uniform(0.1, 0.4)):
                    return
                running.kill_worker(random_.randrange(4))
                running.start_worker()
                killed.append(1)

        killed: list[int] = []
        while len(killed) < kills:
            folder = tmp_path / "store"
            store = Store(folder)
            server.requests()
            _while_importing(
                disturb,
                lambda store=store: blobstore.distributed.import_model(  # type: ignore[misc]
                    f"{server.url}/m/", "m", client=client, store=store, quant="int4"
                ),
            )
            fetched = [one for one in server.requests() if one.path.endswith(".safetensors")]
            read.append(sum(one.body for one in fetched) / nbytes)
            shutil.rmtree(folder)
    shown = f"{min(read):.3f} to {max(read):.3f} of the source read in {len(read)} imports"
    sys.stderr.write(f"{len(killed)} workers killed, {shown}\n")
    assert max(read) <= most + 0.03


def test_the_scheduler_is_restarted(tmp_path: Path) -> None:
    source = sharded_checkpoint(tmp_path / "m", 24)
    plan = tmp_path / "plan.json"
    blobstore.write_plan(blobstore.plan_import(source, quant="int4"), plan)
    with cluster(tmp_path, 1) as (running, client):

        def disturb(done: threading.Event) -> None:
            receipts = Path(f"{plan}.receipts")
            while not done.is_set() and not (receipts.exists() and any(receipts.iterdir())):
                done.wait(0.01)
            running.kill_scheduler()
            running.kill_worker(0)
            running.start_scheduler()
            running.start_worker()

        found = _while_importing(
            disturb,
            lambda: blobstore.distributed.import_model(
                name="m", plan=plan, client=client, store=Store(tmp_path / "store")
            ),
        )
    assert found.manifest.raw == alone(source)
