"""`blobstore serve`: times of its answers, and its memory when idle.

`python tests/bench/serving.py [--tensors N] [--models N] [--folder F]` makes a store of N small
models, and one with two models of N tensors, each tensor in a blob of its own, or 64 in each;
serves each in a process of its own; and prints a Markdown table of the times at the client, over
loopback. ``first``: nothing is known of the store. ``restarted``: another server has listed it.
``again``: the median of 20. A page's answers are those that it asks for at once: the model, its
tensors, and the treemap. The page cache is warm.
"""

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

from tables import show, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.large_models import large_model
from support.patient import Served, serving

from blobstore import open_store

ROUNDS = 20
FORMS = {"single": 1, "many": 64}


def seconds(server: Served, targets: Sequence[str]) -> float:
    """Return how long several answers take that are asked for at once."""

    def get(target: str) -> None:
        with urlopen(f"http://{server.host}{target}", timeout=60) as answer:  # our own server
            answer.read()

    with ThreadPoolExecutor(len(targets)) as pool:
        start = time.perf_counter()
        list(pool.map(get, targets))
        return time.perf_counter() - start


def again(server: Served, targets: Sequence[str]) -> float:
    return statistics.median(seconds(server, targets) for _ in range(ROUNDS))


def idle_mb(pid: int) -> float:
    """Return the resident memory after two seconds of rest, in MB."""
    time.sleep(2)
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 / 1e6 if found else 0.0


def measure_list(root: Path, what: str) -> None:
    """Print how long the list of a store takes, first and again."""
    target = ["/api/models"]
    for stage in ("first", "restarted"):
        with serving("--store", str(root)) as server:
            show((f"{what}, {stage}", f"{seconds(server, target):.3f} s"))
            if stage == "restarted":
                show((f"{what}, again", f"{again(server, target):.3f} s"))


def measure_pages(root: Path, what: str) -> None:
    """Print how long the answers of a model's page take, and the memory after them."""
    with serving("--store", str(root)) as server:
        for name, together in FORMS.items():
            found = f"model={name}"
            page = [f"/api/model?name={name}", f"/api/tensors?{found}"]
            page.append(f"/api/plots/treemap?{found}")
            show((f"{what}, {together} in a blob, first", f"{seconds(server, page):.3f} s"))
            show((f"{what}, {together} in a blob, again", f"{again(server, page):.3f} s"))
        show(("resident memory when idle", f"{idle_mb(server.process.pid):.1f} MB"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=50_000)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where the stores are made")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="blobstore-serving-", dir=given.folder) as folder:
        many, large = Path(folder) / "many", Path(folder) / "large"
        for index in range(given.models):
            large_model(open_store(many), f"many/model-{index:04}:int4", 2)
        for name, together in FORMS.items():
            large_model(open_store(large), name, given.tensors, together=together)
        table("answer", "measured")
        measure_list(many, f"list of {given.models:,} models")
        measure_pages(large, f"page of {given.tensors:,} tensors")


if __name__ == "__main__":
    main()
