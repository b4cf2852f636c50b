"""Imports on Dask clusters: the model of one process, whatever is killed meanwhile; `lab`."""

import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from integration.far_rigs import far_rig
from support import PYCODE_MOE
from support.many import expert_shards, sharded_checkpoint
from support.ports import free_port

from blobstore import distributed, import_model, plan_import, verify, write_plan
from blobstore.errors import CorruptDataError, UsageError
from blobstore.names import ModelName
from blobstore.source.addresses import open_folder
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # tornado and Dask leave sockets to the collector
]


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collect those sockets here: another test would fail for them."""
    yield
    gc.collect()


PATIENCE_S = 600
"""How long processes try to reach each other; by default 30 s, after which clients give up."""


class Cluster:
    """A scheduler and workers, each a process of its own that can be killed."""

    def __init__(self, folder: Path) -> None:
        self._place = folder / "scheduler.json"
        self._local = folder / "workers"
        self._port = str(free_port())
        self._workers: list[subprocess.Popen[bytes]] = []
        self.start_scheduler()

    def start_scheduler(self) -> None:
        """Start a scheduler, later ones at the first's address, which no one else gets."""
        self._place.unlink(missing_ok=True)
        place = ["--port", self._port, "--host", "127.0.0.1", "--scheduler-file", str(self._place)]
        self._scheduler = _start("scheduler", "--no-dashboard", "--no-jupyter", *place)
        while True:
            with suppress(OSError, ValueError):
                self.address = json.loads(self._place.read_bytes())["address"]
                break
            assert self._scheduler.poll() is None
            time.sleep(0.05)  # its file is the only sign of life

    def start_worker(self) -> None:
        limits = ["--nthreads", "1", "--memory-limit", "1GB", "--no-nanny"]
        place = ["--local-directory", str(self._local), "--no-dashboard"]
        self._workers.append(_start("worker", self.address, *limits, *place))

    def kill_worker(self, number: int = 0) -> None:
        _kill(self._workers.pop(number))

    def kill_scheduler(self) -> None:
        _kill(self._scheduler)

    def close(self) -> None:
        for process in (*self._workers, self._scheduler):
            _kill(process)


def _start(what: str, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", f"distributed.cli.dask_{what}", *words],
        env=os.environ | {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": str(PATIENCE_S)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[tuple[Cluster, Any]]:
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
    return import_model(source, "m", store=MemoryStore(), quant=quant).manifest.raw


def at_result(count: int, act: Callable[[], object]) -> Callable[[int, str], None]:
    """Return a progress function that acts when so many results of tasks have come."""
    numbers = itertools.count(1)

    def progress(nbytes: int, _name: str) -> None:
        if nbytes and next(numbers) == count:
            act()

    return progress


def test_two_workers_make_the_model_of_one_process(tmp_path: Path) -> None:
    """By the function and by the command."""
    with cluster(tmp_path, 2) as (running, client):
        store, seen = Store(tmp_path / "store"), list[int]()
        found = distributed.import_model(
            PYCODE_MOE,
            "m",
            client=client,
            store=store,
            quant="nvfp4",
            progress=lambda nbytes, _name: seen.append(nbytes),
        )
        assert found.manifest.raw == alone(PYCODE_MOE, "nvfp4")
        assert sum(seen) == found.source_bytes  # each byte once
        assert verify(store).is_sound
        place = ["--on", running.address.replace("tcp://", "dask://"), "--store", str(store.root)]
        line = ["import", str(PYCODE_MOE), "m:int4", "--quant", "int4", *place]
        subprocess.run([sys.executable, "-m", "blobstore", *line], check=True, capture_output=True)
        assert store.manifest("m:int4").raw == alone(PYCODE_MOE)


@contextmanager
def in_process(**options: Any) -> Iterator[tuple[Any, Any]]:
    """Start a cluster in this process, which is larger than its limit; give it with a client."""
    import dask
    from distributed import Client, LocalCluster

    limits = ("target", "spill", "pause", "terminate")
    with (
        dask.config.set({f"distributed.worker.memory.{limit}": False for limit in limits}),
        LocalCluster(processes=False, dashboard_address=":0", **options) as found,
        Client(found, set_as_default=False) as client,
    ):
        yield found, client


def test_an_error_of_a_task_or_a_worker_is_the_error_of_the_import(tmp_path: Path) -> None:
    source, store = sharded_checkpoint(tmp_path / "m", 4), Store(tmp_path / "store")
    plan, name = plan_import(source), ModelName.of("m")
    one: dict[str, Any] = {"n_workers": 1, "threads_per_worker": 8}
    with (
        in_process(**one, memory_limit="250MB") as (_, client),
        pytest.raises(UsageError, match="250,000,000"),
    ):
        distributed.run_plan_on(client, plan, name, store)
    os.utime(next(source.glob("*-00003-*")), (1, 1))
    with (
        in_process(**one, memory_limit="64GB") as (_, client),
        pytest.raises(CorruptDataError, match="since the plan"),
    ):
        distributed.run_plan_on(client, plan, name, store)
    assert not store.manifests.names()


@pytest.mark.parametrize("kills", [1, pytest.param(200, marks=pytest.mark.long)])
def test_the_source_is_read_once_whoever_is_killed(kills: int, tmp_path: Path) -> None:
    """Workers are killed, and servers count what they send: a kill may lose a task's reads."""
    random = Random(17)
    files = expert_shards(tmp_path / "m", 45, 60_000_000)
    with far_rig("hub", files) as rig, cluster(tmp_path, 2) as (running, client):
        with rig.open() as folder:
            expected = alone(folder)

        def disturb() -> None:
            running.kill_worker(random.randrange(2))
            running.start_worker()

        for number in range(kills):
            rig.play()
            store = Store(tmp_path / f"store-{number}")
            found = distributed.import_model(
                rig.address,
                "m",
                client=client,
                store=store,
                quant="int4",
                open_source=partial(open_folder, endpoint=rig.endpoint),
                progress=at_result(random.randint(1, 30), disturb),
            )
            assert found.manifest.raw == expected
            assert verify(store).is_sound
            assert sum(script.sent for script in rig.scripts) < 1.3 * rig.nbytes


def test_the_scheduler_is_restarted(tmp_path: Path) -> None:
    source, plan = sharded_checkpoint(tmp_path / "m", 24), tmp_path / "plan.json"
    write_plan(plan_import(source, quant="int4"), plan)
    with cluster(tmp_path, 1) as (running, client):

        def restart() -> None:
            running.kill_scheduler()
            running.kill_worker()
            running.start_scheduler()
            running.start_worker()

        found = distributed.import_model(
            name="m",
            plan=plan,
            client=client,
            store=Store(tmp_path / "store"),
            progress=at_result(3, restart),
        )
    assert found.manifest.raw == alone(source)
