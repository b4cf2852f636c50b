"""The cache of a bucket's blobs: kills, failing calls, a full disk, and many processes.

Whatever happens, a blob in the cache has the bytes of its name, an error is one of ours, and the
next process gets the model. The bucket is a folder (``file://``), which obstore reads.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from faults.lab.cached import DATA, Bringing, unused_processes
from faults.lab.cases import sample
from faults.lab.command import Done, Fail, Kill
from faults.lab.stops import Call
from support.faults import file_system

from blobstore.names import Digest
from blobstore.store.local.store import Store
from blobstore.testing.blobs import commit

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="system calls are stopped at on Linux"),
]
COUNTS = [
    pytest.param(6, id="6"),
    pytest.param(None, id="all", marks=pytest.mark.long),
]


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """A bucket with six blobs of 200,000 bytes."""
    commit(Store(tmp_path / "far"), "m", *DATA, with_config=False)
    return tmp_path / "far"


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    """Four processes to fork: one for each that runs at a time."""
    with unused_processes(4) as pool:
        yield pool


Bring = Callable[..., Done]


@pytest.fixture
def bring(far: Path, processes: ProcessPoolExecutor) -> Bring:
    """Bring blobs into a cache and read them, in a process of its own. One of our errors is 3."""

    def brought(cache: Path, limit: int, numbers: range, **faults: Any) -> Done:
        wanted = Bringing(far=far, cache=cache, limit=limit, numbers=numbers, **faults)
        return processes.submit(wanted.run).result()

    return brought


def is_whole(cache: Path) -> bool:
    """Return True if every blob in the cache has the bytes of its name."""
    return all(
        Digest.of(path.read_bytes()).file_name == path.name for path in cache.glob("blobs/sha256-*")
    )


def changes(call: Call) -> bool:
    return not call.reads


class Case:
    """One process that brings blobs 2 to 5 into a cache that is full of blobs 0 to 3."""

    def __init__(self, bring: Bring, folder: Path) -> None:
        self._bring, self._folder, self._number = bring, folder, 0

    def cache(self) -> Path:
        """Return a new cache with four blobs."""
        self._number += 1
        cache = self._folder / f"cache{self._number}"
        assert self._bring(cache, 800_000, range(4)).code == 0
        return cache

    def run(self, cache: Path, **faults: Any) -> Done:
        """Bring the others."""
        return self._bring(cache, 800_000, range(2, 6), **faults)

    def points(self) -> int:
        """Return how many calls change the disk."""
        done = self.run(self.cache(), is_watched=True)
        assert (done.code, done.err) == (0, "")
        return sum(map(changes, done.calls))


@pytest.mark.parametrize("count", COUNTS)
def test_killed_at_a_system_call(bring: Bring, tmp_path: Path, count: int | None) -> None:
    case = Case(bring, tmp_path)
    killed = 0
    for number in sample(range(1, case.points() + 1), count):
        cache = case.cache()
        killed += case.run(cache, at=(number, Kill())).code == -9
        assert is_whole(cache), number
        done = case.run(cache)
        assert (done.code, done.err) == (0, ""), number
        assert is_whole(cache)
        assert sum(path.stat().st_size for path in cache.glob("blobs/*")) <= 800_000
    assert killed > 3


@pytest.mark.parametrize("count", COUNTS)
def test_a_failing_system_call(bring: Bring, tmp_path: Path, count: int | None) -> None:
    case, code = Case(bring, tmp_path), errno.EIO
    failed = 0
    for number in sample(range(1, case.points() + 1), count):
        cache = case.cache()
        done = case.run(cache, at=(number, Fail(code)))
        assert done.code in (0, 3), (number, done.err)
        failed += done.code == 3
        assert is_whole(cache), number
        assert (case.run(cache).code, is_whole(cache)) == (0, True), number
    assert failed


def test_a_full_disk(bring: Bring, tmp_path: Path) -> None:
    """The disk is smaller than the limit: older blobs make room; without any it is an error."""
    with file_system(tmp_path / "disk", "size=1m") as disk:
        for numbers in (range(3), range(2, 5), range(3, 6)):
            done = bring(disk / "cache", 10**9, numbers)
            assert (done.code, done.err) == (0, "")
            assert is_whole(disk / "cache")
        done = bring(disk / "cache", 10**9, range(6))
        assert done.code == 3
        assert "no space left on device" in done.err
        assert is_whole(disk / "cache")
        assert bring(disk / "cache", 10**9, range(3)).code == 0


@pytest.mark.parametrize("times", [5, pytest.param(200, marks=pytest.mark.long)])
def test_processes_that_share_a_cache(bring: Bring, tmp_path: Path, times: int) -> None:
    """Each removes what the others brought, and some are killed: every read has the right bytes."""
    cache, codes = tmp_path / "cache", []

    def work(choices: Random) -> None:
        for _ in range(times):
            begin, after = choices.randrange(4), choices.choice([None, choices.uniform(0, 0.3)])
            done = bring(cache, 600_000, range(begin, begin + 2), kill_after_s=after)
            codes.append(done.code)

    workers = [threading.Thread(target=work, args=(Random(seed),)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert set(codes) <= {0, -9}
    assert codes.count(0) >= times
    assert is_whole(cache)
    assert bring(cache, 600_000, range(2)).code == 0
