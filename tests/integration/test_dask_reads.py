"""Imports on Dask whose workers and scheduler are killed read their source once, and little more.

The laboratory kills 10 workers, the long form 200, two of each import, and the scheduler once. A
local source is counted by the workers before each read; one on a server by nginx, so also what was
sent to workers that died. A kill may lose a task's reads, which is a thirtieth of the source: 14 in
five imports are less than a tenth of what they read, whatever the machine's speed is.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.dask_clusters import Cluster, cluster, while_importing
from support.hub_stand_in import hub_stand_in
from support.many import expert_shards

import blobstore.distributed
from blobstore.source.addresses import open_folder
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # tornado and Dask leave sockets to the collector
]

WORKERS = 4
FILES = 45
KILLS_EACH = 2
Opener = Callable[[str], Any]


@contextmanager
def local_source(folder: Path, source: Path) -> Iterator[tuple[str, Opener, Callable[[], int]]]:
    """Give a source on the disk, and the count of what was read since."""

    def count() -> int:
        reads = folder / "reads"
        return sum(map(int, reads.read_text().split())) if reads.exists() else 0

    yield str(source), open_folder, count


@contextmanager
def hub_source(folder: Path, source: Path) -> Iterator[tuple[str, Opener, Callable[[], int]]]:
    """Give a source on the Hub, whose files have declared digests."""
    counts: list[int] = []
    with hub_stand_in(folder / "hub", source) as hub:

        def count() -> int:
            counts.append(sum(request.body for request in hub.store.requests()))
            return sum(counts)

        yield "hf://org/name", partial(open_folder, endpoint=hub.url), count


@pytest.mark.parametrize("place", [local_source, hub_source])
@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.long)])
def test_the_source_is_read_once_whatever_is_killed(place: Any, kills: int, tmp_path: Path) -> None:
    files = expert_shards(tmp_path / "m", FILES, 1_500_000_000)
    nbytes = sum(path.stat().st_size for path in files.glob("*.safetensors"))
    counted = {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "COUNTED_READS": str(tmp_path / "reads"),
    }
    imports, killing = 0, Killing(kills)
    with (
        place(tmp_path, files) as (source, opener, count),
        cluster(tmp_path, WORKERS, 1, ["support.counted_reads"], counted) as (running, client),
    ):
        with opener(source) as folder:
            expected = blobstore.import_model(folder, "m", store=MemoryStore(), quant="int4").digest
        before = count()
        while killing.left:
            store = Store(tmp_path / f"store-{imports}")
            found = while_importing(
                partial(killing.disturb, running),
                lambda store=store: blobstore.distributed.import_model(  # type: ignore[misc]
                    source, "m", client=client, store=store, quant="int4", open_source=opener
                ),
            )
            assert found.digest == expected
            assert blobstore.verify(store).is_sound
            store.remove("m")
            imports += 1
        read = (count() - before) / (imports * nbytes)
    sys.stderr.write(
        f"{kills} workers and {killing.schedulers} schedulers killed in {imports} imports: "
        f"the source was read {read:.3f} times\n"
    )
    assert 1 <= read <= 1.3  # the tasks that killed workers had not finished are repeated


class Killing:
    """Kills two workers of each import at random times, once the scheduler with all workers."""

    def __init__(self, kills: int) -> None:
        self.left = kills
        self.schedulers = 0
        self._random = random.Random(17)

    def disturb(self, running: Cluster, done: threading.Event) -> None:
        """Kill until an import is done."""
        if not self.schedulers and not done.wait(0.2):
            self.schedulers += 1
            self._restart(running)
        for _ in range(min(KILLS_EACH, self.left)):
            if done.wait(self._random.uniform(0.1, 0.8)):
                break
            running.kill_worker(self._random.randrange(WORKERS))
            running.start_worker()
            self.left -= 1

    def _restart(self, running: Cluster) -> None:
        running.kill_scheduler()
        for _ in range(WORKERS):
            running.kill_worker(0)
        running.start_scheduler()
        for _ in range(WORKERS):
            running.start_worker()
