"""Imports on Dask clusters of this machine: the model of one process, whatever is killed meanwhile.

The laboratory runs these; the long form kills 200 workers.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import PYCODE_MOE
from support.hub_stand_in import hub_stand_in
from support.many import expert_shards, sharded_checkpoint
from support.ports import free_port

from blobstore import distributed, import_model, plan_import, verify, write_plan
from blobstore.errors import CorruptDataError, RemoteError, UsageError
from blobstore.names import ModelName
from blobstore.source.addresses import open_folder
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # tornado and Dask leave sockets to the collector
]


PATIENCE_S = 300
CONNECT = "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT"
"""How long processes try to reach each other; by default 30 s, after which clients give up."""
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


class Cluster:
    """A scheduler and workers, each a process of its own that can be killed."""

    def __init__(self, folder: Path) -> None:
        self._place = folder / "scheduler.json"
        self._local = folder / "workers"
        self._port = str(free_port())
        self._workers: list[subprocess.Popen[bytes]] = []
        self.start_scheduler()

    def start_scheduler(self) -> None:
        """Start a scheduler; after the first, at the address of the first.

        It is not an address that the kernel gives to connections: one could take it meanwhile.
        """
        self._place.unlink(missing_ok=True)
        command = ["distributed.cli.dask_scheduler", "--no-dashboard", "--no-jupyter"]
        more = ["--port", self._port, "--host", "127.0.0.1", "--scheduler-file", str(self._place)]
        self._scheduler = _start([*command, *more])
        while True:
            with suppress(OSError, ValueError):
                self.address = json.loads(self._place.read_bytes())["address"]
                break
            assert self._scheduler.poll() is None
            time.sleep(0.05)  # its file is the only sign of life

    def kill_scheduler(self) -> None:
        _kill(self._scheduler)

    def start_worker(self, threads: int = 1, memory: str = "1GB") -> None:
        limits = ["--nthreads", str(threads), "--memory-limit", memory, "--no-nanny"]
        place = ["--local-directory", str(self._local), "--no-dashboard"]
        self._workers.append(_start(["distributed.cli.dask_worker", self.address, *limits, *place]))

    def kill_worker(self, number: int) -> None:
        _kill(self._workers.pop(number))

    def close(self) -> None:
        for process in (*self._workers, self._scheduler):
            _kill(process)


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {CONNECT: str(PATIENCE_S)}
    return subprocess.Popen([sys.executable, "-m", *command], env=environment, **QUIET)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextmanager
def cluster(folder: Path, workers: int = 0) -> Iterator[tuple[Cluster, Any]]:
    """Start a cluster; give it with a client."""
    import dask
    from distributed import Client

    found = Cluster(folder)
    try:
        for _ in range(workers):
            found.start_worker()
        with (
            dask.config.set({"distributed.comm.timeouts.connect": PATIENCE_S}),
            Client(found.address, set_as_default=False) as client,
        ):
            yield found, client
    finally:
        found.close()


def alone(source: Any, quant: str = "int4") -> bytes:
    """Return the manifest of an import in this process."""
    return import_model(source, "m", store=MemoryStore(), quant=quant).manifest.raw


def while_importing(act: Callable[[threading.Event], None], run: Callable[[], Any]) -> Any:
    """Return what ``run`` returns, while ``act`` disturbs it until the event is set."""
    done = threading.Event()
    thread = threading.Thread(target=act, args=(done,))
    thread.start()
    try:
        return run()
    finally:
        done.set()
        thread.join()


def test_two_workers_make_the_model_of_one_process(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as (_, client):
        for quant in ("none", "nvfp4"):
            store = Store(tmp_path / quant)
            seen: list[int] = []
            found = distributed.import_model(
                PYCODE_MOE,
                "m",
                client=client,
                store=store,
                quant=quant,
                progress=lambda nbytes, _name: seen.append(nbytes),  # noqa: B023
            )
            assert found.manifest.raw == alone(PYCODE_MOE, quant)
            assert sum(seen) == found.source_bytes  # each byte once
            assert verify(store).is_sound


def test_an_adaptive_cluster(tmp_path: Path) -> None:
    """It has no worker at first, starts some for the import, and may retire them meanwhile."""
    from distributed import Client, LocalCluster

    source = sharded_checkpoint(tmp_path / "m", 8)
    with (
        LocalCluster(n_workers=0, threads_per_worker=1, dashboard_address=None) as local,
        Client(local, set_as_default=False) as client,
    ):
        local.adapt(minimum=0, maximum=4)
        found = distributed.import_model(
            source, "m", client=client, store=Store(tmp_path / "store"), quant="int4"
        )
    assert found.manifest.raw == alone(source)


def test_two_clients_import_the_same_source_into_two_stores(tmp_path: Path) -> None:
    """Their plans are equal, and Dask knows tasks by their keys."""
    source = sharded_checkpoint(tmp_path / "m", 12)
    stores = [Store(tmp_path / name) for name in ("one", "two")]
    with cluster(tmp_path, 2) as (_, client), ThreadPoolExecutor(2) as threads:
        run = partial(distributed.import_model, source, "m", client=client, quant="int4")
        running = [threads.submit(run, store=store) for store in stores]
        assert {one.result().manifest.raw for one in running} == {alone(source)}
    assert all(verify(store).is_sound for store in stores)


def test_the_command(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as (running, _):
        address = running.address.replace("tcp://", "dask://")
        store = ["--store", str(tmp_path / "store")]
        line = ["import", str(PYCODE_MOE), "m:int4", "--quant", "int4", "--on", address, *store]
        subprocess.run([sys.executable, "-m", "blobstore", *line], check=True, **QUIET)
    assert Store(tmp_path / "store").manifest("m:int4").raw == alone(PYCODE_MOE)


def test_an_error_of_a_task_or_a_worker_is_the_error_of_the_import(tmp_path: Path) -> None:
    source, store = sharded_checkpoint(tmp_path / "m", 4), Store(tmp_path / "store")
    plan = plan_import(source)
    with cluster(tmp_path) as (running, client):
        running.start_worker(threads=8, memory="250MB")
        with pytest.raises(UsageError, match="may use 250,000,000 bytes, and has 8 threads"):
            distributed.run_plan_on(client, plan, ModelName.of("m"), store)
        running.kill_worker(0)
        running.start_worker()
        os.utime(next(source.glob("*-00003-*")), (1, 1))
        with pytest.raises(CorruptDataError, match="written to since the plan"):
            distributed.run_plan_on(client, plan, ModelName.of("m"), store)
    assert not store.manifests.names()


def test_a_scheduler_that_can_not_be_reached() -> None:
    with (
        pytest.raises(RemoteError, match="can't be reached"),
        distributed.connected("dask://127.0.0.1:9"),
    ):
        pass


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.long)])
def test_the_source_is_read_once_whoever_is_killed(kills: int, tmp_path: Path) -> None:
    """Two workers of each import are killed at random times; the Hub's nginx counts what it sends.

    A kill may lose the reads of a task, which is a thirtieth of the source.
    """
    files = expert_shards(tmp_path / "m", 45, 300_000_000)
    nbytes = sum(path.stat().st_size for path in files.glob("*.safetensors"))
    random_, left, imports = random.Random(17), kills, 0

    def disturb(running: Cluster, done: threading.Event) -> None:
        nonlocal left
        for _ in range(2):
            if done.wait(random_.uniform(0.1, 0.8)):
                return
            running.kill_worker(random_.randrange(4))
            running.start_worker()
            left -= 1

    with hub_stand_in(tmp_path / "hub", files) as hub, cluster(tmp_path, 4) as (running, client):
        opener = partial(open_folder, endpoint=hub.url)
        with opener("hf://org/name") as folder:
            expected = alone(folder)
        hub.store.requests()
        while left > 0:
            store = Store(tmp_path / f"store-{imports}")
            run = partial(
                distributed.import_model,
                "hf://org/name",
                "m",
                client=client,
                store=store,
                quant="int4",
                open_source=opener,
            )
            found = while_importing(partial(disturb, running), run)
            assert found.manifest.raw == expected
            assert verify(store).is_sound
            store.remove("m")
            imports += 1
        read = sum(request.body for request in hub.store.requests()) / (imports * nbytes)
    sys.stderr.write(f"{kills} workers killed in {imports} imports: read {read:.3f} times\n")
    assert 1 <= read <= 1.3


def test_the_scheduler_is_restarted(tmp_path: Path) -> None:
    source, plan = sharded_checkpoint(tmp_path / "m", 24), tmp_path / "plan.json"
    write_plan(plan_import(source, quant="int4"), plan)
    with cluster(tmp_path, 1) as (running, client):

        def disturb(done: threading.Event) -> None:
            receipts = Path(f"{plan}.receipts")
            while not done.is_set() and not (receipts.exists() and any(receipts.iterdir())):
                done.wait(0.01)
            running.kill_scheduler()
            running.kill_worker(0)
            running.start_scheduler()
            running.start_worker()

        run = partial(
            distributed.import_model,
            name="m",
            plan=plan,
            client=client,
            store=Store(tmp_path / "store"),
        )
        found = while_importing(disturb, run)
    assert found.manifest.raw == alone(source)
