"""Imports on Dask clusters of this machine: the model of one process, whatever is killed meanwhile.

The laboratory runs these; the long form kills 200 workers.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import PYCODE_MOE, QUANT_TYPES
from support.dask_clusters import QUIET, cluster, while_importing
from support.many import sharded_checkpoint
from support.nginx import nginx

import blobstore.distributed
from blobstore.errors import CorruptDataError, RemoteError, UsageError
from blobstore.names import ModelName
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # tornado and Dask leave sockets to the collector
]


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

        found = while_importing(
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


def test_two_clients_import_the_same_source_into_two_stores(tmp_path: Path) -> None:
    """Their plans are equal, and Dask knows tasks by their keys."""
    source = sharded_checkpoint(tmp_path / "m", 12)
    stores = [Store(tmp_path / name) for name in ("one", "two")]
    with cluster(tmp_path, 2) as (_, client), ThreadPoolExecutor(2) as threads:
        running = [
            threads.submit(
                blobstore.distributed.import_model,
                source,
                "m",
                client=client,
                store=store,
                quant="int4",
            )
            for store in stores
        ]
        assert len({one.result().digest for one in running}) == 1
    assert all(blobstore.verify(store).is_sound for store in stores)


def test_the_command(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as (running, _):
        address = running.address.replace("tcp://", "dask://")
        store = ["--store", str(tmp_path / "store")]
        line = ["import", str(PYCODE_MOE), "m:int4", "--quant", "int4", "--on", address, *store]
        subprocess.run([sys.executable, "-m", "blobstore", *line], check=True, **QUIET)
    assert Store(tmp_path / "store").manifest("m:int4").raw == alone(PYCODE_MOE)


def test_the_seconds_are_those_of_the_whole_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=iter((100.0, 109.0)).__next__, sleep=time.sleep)
    monkeypatch.setattr(blobstore.distributed, "time", clock)
    with cluster(tmp_path, 1) as (_, client):
        found = blobstore.distributed.import_model(
            PYCODE_MOE, "m", client=client, store=Store(tmp_path / "store")
        )
    assert found.seconds == 9


def test_an_error_of_a_task_is_the_error_of_the_import(tmp_path: Path) -> None:
    source = sharded_checkpoint(tmp_path / "m", 4)
    plan = blobstore.plan_import(source)
    os.utime(next(source.glob("*-00003-*")), (1, 1))
    with (
        cluster(tmp_path, 1) as (_, client),
        pytest.raises(CorruptDataError, match="written to since the plan"),
    ):
        blobstore.distributed.run_plan_on(client, plan, ModelName.of("m"), Store(tmp_path / "s"))
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
            found = while_importing(
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

    And headers. How much that is depends on the moments.
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
            while_importing(
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

        found = while_importing(
            disturb,
            lambda: blobstore.distributed.import_model(
                name="m", plan=plan, client=client, store=Store(tmp_path / "store")
            ),
        )
    assert found.manifest.raw == alone(source)
