"""Dask clusters of this machine whose processes can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    def __init__(
        self,
        folder: Path,
        preload: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._more = [part for name in preload for part in ("--preload", name)]
        self._environment = {**os.environ, _CONNECT: str(_PATIENCE_S), **(environment or {})}
        self._place = folder / "scheduler.json"
        self._local = folder / "workers"
        self._port = str(free_port())
        self._scheduler: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        self.start_scheduler()

    def start_scheduler(self) -> None:
        """Start a scheduler; after the first, at the address of the first.

        It is not an address that the kernel gives to connections: one could take it meanwhile.
        """
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

    def kill_scheduler(self) -> None:
        assert self._scheduler is not None
        self._scheduler.kill()
        self._scheduler.wait()

    def start_worker(self, threads: int = 1, memory: str = "1GB") -> None:
        limits = ["--nthreads", str(threads), "--memory-limit", memory, "--no-nanny"]
        place = ["--local-directory", str(self._local), "--no-dashboard"]
        command = ["distributed.cli.dask_worker", self.address, *limits, *place]
        self.workers.append(self._start([*command, *self._more]))

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", *command], env=self._environment, **QUIET)

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
def cluster(
    folder: Path,
    workers: int = 0,
    threads: int = 1,
    preload: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[Cluster, Any]]:
    """Start a cluster; give it with a client. ``preload``: modules that each worker loads."""
    import dask
    from distributed import Client

    found = Cluster(folder, preload, environment)
    try:
        for _ in range(workers):
            found.start_worker(threads)
        with (
            dask.config.set({"distributed.comm.timeouts.connect": _PATIENCE_S}),
            Client(found.address, set_as_default=False) as client,
        ):
            yield found, client
    finally:
        found.close()


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
