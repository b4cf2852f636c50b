"""Compares ways to send a large blob over ``/v2/``: ``python tests/bench/blob_sending.py``.

The same file, the same client (``curl -o /dev/null``, one and several at once) and the same run for
nginx and blobstore. GB/s, and seconds of the server's
processor time for each GB. ``--turns N``: instead, nginx and blobstore in turn, N times, to one
client. Needs nginx and curl. ``--size`` in GB, ``--folder``: where the file lies, whose pages
should stay in memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.ports import free_port
from support.registries import answers, running
from tables import show, table

import blobstore
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.names import Digest, ModelName

CLIENTS = (1, 4, 8)
TYPE = "application/vnd.ollama.image.tensor"
NGINX = """
worker_processes {workers}; daemon off; pid {folder}/pid; error_log {folder}/error;
events {{}}
http {{
  access_log off; sendfile on; tcp_nopush on;
  client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
  uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))  # noqa: S108
    parser.add_argument("--only", default="", metavar="WORD,…", help="ways with such a word")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        digest = fill(folder / "store", int(options.size * 1e9))
        print(machine(folder, ("uvicorn", "h11", "starlette")))
        if options.turns:
            in_turn(folder, digest, options.size, options.turns)
            return
        ways = {
            "nginx, one worker": nginx(folder, digest, 1),
            "nginx, a worker a core": nginx(folder, digest, os.cpu_count() or 1),
            "blobstore serve": ours(folder, digest),
        }
        table("way", *(f"{n} at once, {unit}" for n in CLIENTS for unit in ("GB/s", "s/GB")))
        for name, way in ways.items():
            if not any(word in name for word in options.only.split(",")):
                continue
            show([name, *measured(way, options.size, options.rounds)])


def fill(root: Path, nbytes: int) -> Digest:
    """Make a store with one model of one blob."""
    store = blobstore.open_store(root)
    data = os.urandom(2**20) * (nbytes // 2**20 + 1)
    with store.session() as session:
        session.put(data[:nbytes])
        digest = Digest.of(memoryview(data)[:nbytes])
        layer = Descriptor(TYPE, digest, nbytes)
        session.publish(ModelName.parse("large:x"), Manifest(layers=(layer,)))
    return digest


def target(digest: Digest) -> str:
    """Return the path of the blob."""
    return f"/v2/library/large/blobs/{digest}"


@contextmanager
def nginx(folder: Path, digest: Digest, workers: int) -> Iterator[tuple[str, list[int]]]:
    """Run nginx over the blobs; give the address of the blob, and the processes."""
    port = free_port()
    place = folder / "nginx"
    place.mkdir(exist_ok=True)
    place.chmod(0o755)
    text = NGINX.format(workers=workers, folder=place, port=port, root=folder / "store/blobs")
    (place / "conf").write_text(f"user root;{text}")
    with running(["nginx", "-p", str(place), "-c", str(place / "conf")], place / "log") as process:
        assert answers(port, process), (place / "log").read_text()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield f"http://127.0.0.1:{port}/{digest.file_name}", [int(child) for child in children]


@contextmanager
def ours(folder: Path, digest: Digest) -> Iterator[tuple[str, list[int]]]:
    """Run ``blobstore serve``."""
    port = free_port()
    line = [sys.executable, "-m", "blobstore", "serve", "--port", str(port)]
    with running([*line, "--store", str(folder / "store")], folder / "log") as process:
        assert answers(port, process), (folder / "log").read_text()
        yield f"http://127.0.0.1:{port}{target(digest)}", [process.pid]


def measured(way: Any, size: float, rounds: int) -> list[str]:
    """Return GB/s and seconds of processor time a GB for each number of clients, at the best."""
    cells = []
    with way as (address, processes):
        for clients in CLIENTS:
            found = [once(address, processes, clients, int(size * 1e9)) for _ in range(rounds)]
            rate, work = max(found)
            cells += [f"{rate:.2f}", f"{work:.2f}"]
    return cells


def in_turn(folder: Path, digest: Digest, size: float, turns: int) -> None:
    """Print the rates of nginx and blobstore to one client, in turn, and the ratio of each turn."""
    with nginx(folder, digest, 1) as peer, ours(folder, digest) as own:
        rates = [
            [once(*way, 1, int(size * 1e9))[0] for way in (peer, own)] for _ in range(turns + 1)
        ][1:]
    table("", "median", "least", "most")
    columns = [*zip(*rates, strict=True), [second / first for first, second in rates]]
    for name, found in zip(("nginx, GB/s", "blobstore, GB/s", "ratio"), columns, strict=True):
        show([name, *(f"{of(found):.2f}" for of in (statistics.median, min, max))])


def once(address: str, processes: list[int], clients: int, nbytes: int) -> tuple[float, float]:
    """Return GB/s, and seconds of processor time a GB."""
    line = ["curl", "-sS", "-o", "/dev/null", "-w", "%{size_download}", address]
    before, began = cpu_s(processes), time.monotonic()
    started = [subprocess.Popen(line, stdout=subprocess.PIPE) for _ in range(clients)]
    got = [int(client.communicate()[0]) for client in started]
    seconds = time.monotonic() - began
    assert got == [nbytes] * clients, got
    return sum(got) / 1e9 / seconds, (cpu_s(processes) - before) / sum(got) * 1e9


def cpu_s(processes: list[int]) -> float:
    """Return the processor time of processes."""
    total = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
