"""`blobstore serve`: times of its answers, and its memory when idle.

`python tests/bench/serving.py [--tensors N] [--models N] [--folder F]` makes a store
of N small models, and one with two models of N tensors, each tensor in a blob of its own, or 64 in
each; serves each in a process of its own; and prints a Markdown table of the times at the client,
over loopback. ``first``: nothing is known of the store. ``restarted``: another server has listed
it. ``again``: the median of 20. A page's answers are those that it asks for at once: the model, its
tensors, and the treemap. The page cache is warm.
"""

from __future__ import annotations

import argparse
import http.client
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tables import show, table, yes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.large_models import large_model, listed_models

from blobstore import open_store

LIST_S, PAGE_S, IDLE_MB = 0.2, 0.3, 120
ROUNDS = 20
FORMS = {"single": 1, "many": 64}


@dataclass(frozen=True)
class Server:
    """A running server."""

    port: int
    pid: int

    def get(self, target: str) -> int:
        """Return the bytes of an answer. Raises: AssertionError unless it is 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", target)
            reply = connection.getresponse()
            body = reply.read()
            assert reply.status == 200, (target, reply.status, body[:200])
            return len(body)
        finally:
            connection.close()

    def seconds(self, targets: Sequence[str]) -> float:
        """Return how long several answers take that are asked for at once."""
        with ThreadPoolExecutor(len(targets)) as pool:
            start = time.perf_counter()
            list(pool.map(self.get, targets))
            return time.perf_counter() - start

    def idle_mb(self) -> float:
        """Return the resident memory after two seconds of rest, in MB."""
        time.sleep(2)
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        return int(found[1]) * 1024 / 1e6 if found else 0.0


@contextmanager
def serving(root: Path) -> Iterator[Server]:
    """Serve a store in a process of its own."""
    line = [sys.executable, "-m", "blobstore", "serve", "--port", "0", "--store", str(root)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)/", process.stdout.readline())
            assert found is not None
            yield Server(int(found[1]), process.pid)
        finally:
            process.terminate()


def row(what: str, value: float, limit: float | None, unit: str) -> None:
    """Print a row of the table."""
    goal = "" if limit is None else f"{limit:g} {unit}"
    reached = "" if limit is None else yes(value <= limit)
    show((what, f"{value:.3g} {unit}", goal, reached))


def page(name: str) -> list[str]:
    """Return what the page of a model asks for."""
    found = f"model={name}"
    return [f"/api/model?name={name}", f"/api/tensors?{found}", f"/api/plots/treemap?{found}"]


def measure_list(root: Path, models: int) -> None:
    """Print how long the list of a store takes, first and again."""
    for stage in ("first", "restarted"):
        with serving(root) as server:
            limit = LIST_S if stage == "restarted" else None
            what = f"list of {models:,} models"
            row(f"{what}, {stage}", server.seconds(["/api/models"]), limit, "s")
            if stage == "restarted":
                again = statistics.median(server.seconds(["/api/models"]) for _ in range(ROUNDS))
                row(f"{what}, again", again, LIST_S, "s")


def measure_pages(root: Path, tensors: int) -> None:
    """Print how long the answers of a model's page take, and the memory after them."""
    with serving(root) as server:
        for name, together in FORMS.items():
            what = f"page of {tensors:,} tensors, {together} in a blob"
            row(f"{what}, first", server.seconds(page(name)), None, "s")
            again = statistics.median(server.seconds(page(name)) for _ in range(ROUNDS))
            row(f"{what}, again", again, PAGE_S, "s")
        row("resident memory when idle", server.idle_mb(), IDLE_MB, "MB")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=50_000)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where the stores are made")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="blobstore-serving-", dir=arguments.folder) as folder:
        many, large = Path(folder) / "many", Path(folder) / "large"
        listed_models(open_store(many), arguments.models)
        for name, together in FORMS.items():
            large_model(open_store(large), name, arguments.tensors, together=together)
        table("answer", "measured", "goal", "reached")
        measure_list(many, arguments.models)
        measure_pages(large, arguments.tensors)


if __name__ == "__main__":
    main()
