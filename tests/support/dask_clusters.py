"""Dask clusters of this machine whose processes can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.ports import free_port

_PATIENCE_S = 300
_CONNECT = "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT"
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
    environment = os.environ | {_CONNECT: str(_PATIENCE_S)}
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
            dask.config.set({"distributed.comm.timeouts.connect": _PATIENCE_S}),
            Client(found.address, set_as_default=False) as client,
        ):
            yield found, client
    finally:
        found.close()
