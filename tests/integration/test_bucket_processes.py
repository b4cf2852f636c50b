"""Processes that work on one container of azurite at once, and that are killed at any moment.

moto's S3 compares an object's version and replaces it in two steps: with two writers and no code of
ours it loses one update in 3,000. The figures of the long forms are in docs/reliability.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from random import Random
from uuid import uuid4

import pytest
from support import ROOT
from support.bucket_work import (
    TAG,
    Done,
    check_moves,
    check_whole,
    store_of,
)
from support.cloud_services import CloudBucket, azure

from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.bucket.leases import read_sweep
from blobstore.testing.blobs import commit, manifest_of

pytestmark = pytest.mark.lab
_LEASE_S = 12.0
"""More than a machine stops for: a writer that stops for longer between its check and its move of a
tag can name a blob that was removed meanwhile."""
_LONG = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudBucket]:
    with azure(tmp_path_factory.mktemp("azure")) as cloud:
        yield cloud


@pytest.fixture
def store(cloud: CloudBucket) -> BucketStore:
    return store_of(f"{cloud.address}/{uuid4().hex}", cloud.options, _LEASE_S)


class Worker:
    """A process that works on a store."""

    def __init__(
        self, cloud: CloudBucket, store: BucketStore, what: str, seed: object, count: int
    ) -> None:
        options = json.dumps(dict(cloud.options))
        words = [store.address, options, what, str(seed), str(count), str(store.lease_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.bucket_work", *words],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT / "tests",
        )

    def done(self) -> Done:
        """Wait for its end, and return what it did."""
        printed, _ = self._process.communicate(timeout=3600)
        assert self._process.returncode == 0
        said = json.loads(printed)
        return Done(Counter(said["counts"]), [(a, b) for a, b in said["moves"]])

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=_LONG)])
def test_two_writers_race_for_a_tag(count: int, cloud: CloudBucket, store: BucketStore) -> None:
    commit(store, str(TAG), b"first")
    workers = [Worker(cloud, store, "race", seed, count) for seed in range(2)]
    done = [worker.done() for worker in workers]
    check_moves(
        store, manifest_of(b"first").digest.hex, [move for one in done for move in one.moves]
    )
    counts = done[0].counts + done[1].counts
    assert counts["lost"] == counts["named"]
    print(f"2 x {count} moves, {counts['lost']} lost races, each said who won")  # noqa: T201  # the figures of docs/reliability.md


@pytest.mark.parametrize("times", [2, pytest.param(200, marks=_LONG)])
def test_kills(times: int, cloud: CloudBucket, store: BucketStore) -> None:
    """Writers and clean-ups are killed beside other writers.

    Nothing partial is ever visible, no model lacks a blob, and the others go on.
    """
    random = Random(times)
    commit(store, "kept", b"kept", with_config=False)
    interrupted = Counter[str]()
    for number in range(times):
        what = ("models", "prune")[number % 2]
        beside = Worker(cloud, store, "models", f"beside {number}", 3)
        worker = Worker(cloud, store, what, number, 10_000)
        time.sleep(random.uniform(0.4, 3.0))  # the moment of its death
        worker.kill()
        interrupted[what] += 1
        interrupted["in a clean-up"] += read_sweep(store.bucket)[1] is not None
        check_whole(store)
        counts = beside.done().counts
        assert not counts["make: NotFoundError"] + counts["find: NotFoundError"]
    done = Worker(cloud, store, "prune", 0, 60).done()
    while not done.counts["prune"]:
        done = Worker(cloud, store, "prune", 0, 60).done()
    check_whole(store)
    commit(store, "last", b"last", with_config=False)
    print(f"{times} kills: {dict(interrupted)}")  # noqa: T201  # the figures of docs/reliability.md
