"""Processes that work on one container of azurite at once, and that are killed at any write.

moto's S3 compares an object's version and replaces it in two steps: with two writers and no code of
ours it loses one update in 3,000. The figures of the long forms are in docs/reliability.md.
"""

import json
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from random import Random
from uuid import uuid4

import pytest
from integration.cloud_services import CloudBucket
from support import ROOT
from support.bucket_work import TAG, check_moves, check_whole, prune

from blobstore.errors import NotFoundError
from blobstore.io.objects import open_bucket
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.bucket.objects import LEASES, SWEEP
from blobstore.testing.blobs import commit, manifest_of

pytestmark = pytest.mark.lab
_LONG = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture
def store(azure: CloudBucket) -> BucketStore:
    return BucketStore(open_bucket(f"{azure.address}/{uuid4().hex}", azure.options))


class Worker:
    """A process that works on a store; it dies before one of its writes, or never."""

    def __init__(
        self,
        cloud: CloudBucket,
        store: BucketStore,
        what: str,
        seed: int,
        count: int,
        dies: int = 0,
    ) -> None:
        words = [store.address, json.dumps(dict(cloud.options)), what, str(seed)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.bucket_work", *words, str(count), str(dies)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT / "tests",
        )

    def done(self) -> tuple[Counter[str], list[tuple[str, str]]]:
        """Wait for its end, and return what it did how often, and how it moved a tag."""
        printed, _ = self.process.communicate(timeout=3600)
        assert self.process.returncode == 0
        turns = [json.loads(line) for line in printed.splitlines()]
        counts = sum((Counter(turn["counts"]) for turn in turns), Counter[str]())
        return counts, [(first, last) for turn in turns for first, last in turn["moves"]]


def expire(store: BucketStore, process: int) -> None:
    """Make the leases of a dead process count no longer."""
    for key in [SWEEP, *(state.key for state in store.bucket.objects(LEASES))]:
        with suppress(NotFoundError):  # no clean-up was there, or a session has ended meanwhile
            said = json.loads(store.bucket.get(key)[0])
            if said["holder"].endswith(f"process {process}"):
                store.bucket.put(key, json.dumps({**said, "lease_s": 0}).encode())


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=_LONG)])
def test_two_writers_race_for_a_tag(count: int, azure: CloudBucket, store: BucketStore) -> None:
    commit(store, str(TAG), b"first")
    workers = [Worker(azure, store, "race", seed, count) for seed in range(2)]
    moves = [move for worker in workers for move in worker.done()[1]]
    check_moves(store, manifest_of(b"first").digest.hex, moves)


@pytest.mark.parametrize("times", [2, pytest.param(200, marks=_LONG)])
def test_kills(times: int, azure: CloudBucket, store: BucketStore) -> None:
    """Writers and clean-ups are killed: nothing partial is visible, no model lacks a blob."""
    random = Random(times)
    commit(store, "kept", b"kept", with_config=False)
    for number in range(1, times + 1):
        beside = Worker(azure, store, "models", -number, 3)
        what = ("models", "prune")[number % 2]
        dying = Worker(azure, store, what, number, 10_000, random.randint(1, 20)).process
        dying.communicate(timeout=3600)
        assert dying.returncode == -9
        check_whole(store)
        expire(store, dying.pid)
        assert not beside.done()[0]["make: NotFoundError"]
    assert prune(store).counts["prune"] == 1
    check_whole(store)
    commit(store, "last", b"last", with_config=False)
