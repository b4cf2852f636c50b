"""Work on one bucket by several processes: models come, go and share blobs; tags race."""

import itertools
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from blobstore.errors import BusyError, ConflictError, NotFoundError, UsageError
from blobstore.formats.documents import Manifest
from blobstore.io.objects import open_bucket
from blobstore.names import ModelName
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.care.prune import prune as prune_once
from blobstore.store.care.verify import verify
from blobstore.testing.blobs import data_of, descriptor_of
from support.buckets import HookedBucket

TAG = ModelName.parse("raced")


@dataclass(slots=True)
class Done:
    """What a process did: how often; the moves of a tag that succeeded."""

    counts: Counter[str] = field(default_factory=Counter)
    moves: list[tuple[str, str]] = field(default_factory=list)


def come_and_go(store: BucketStore, seed: object, count: int) -> Done:
    """Make, copy and remove models of a few names at random."""
    random, done = Random(f"{seed}"), Done()
    for _ in range(count):
        name, other = (ModelName.parse(f"m{random.randrange(12)}") for _ in range(2))
        what = random.choice(("make", "make", "make", "copy", "remove"))
        try:
            if what == "make":
                _make(store, name, random)
            elif what == "copy":
                store.copy(str(other), str(name), replace=True)
            else:
                store.remove(name)
            done.counts[what] += 1
        except (ConflictError, BusyError, NotFoundError, UsageError) as error:
            done.counts[f"{what}: {type(error).__name__}"] += 1
    return done


def _make(store: BucketStore, name: ModelName, random: Random) -> None:
    """Publish a model of some of 40 shared blobs, most of which are there, or are being removed."""
    blobs = [data_of(50 + number, number) for number in random.sample(range(40), 3)]
    with store.session() as session:
        for data in blobs:
            key = f"{len(data):064x}"
            if session.recall(key, len(data), verify=False) is None:
                session.note(key, session.put(data))
        layers = [descriptor_of(data, f"{len(data)}") for data in blobs]
        session.publish(store.target(name), Manifest(layers=tuple(layers)))


def prune(store: BucketStore, _seed: object = None, count: int = 1) -> Done:
    """Prune again and again, blobs of any age."""
    done = Done()
    for _ in range(count):
        try:
            result = prune_once(store, grace_s=0, sole_owner=True, forget=True)
            done.counts["prune"] += 1
            done.counts["pruned"] += len(result.removed)
        except BusyError:
            done.counts["BusyError"] += 1
    return done


def race(store: BucketStore, seed: object, count: int) -> Done:
    """Move one tag ``count`` times, each time from the model that it has."""
    done, number = Done(), 0
    while len(done.moves) < count:
        number += 1
        before = store.manifests.read(TAG)
        data = f"{seed} {number}".encode()
        manifest = Manifest(layers=(descriptor_of(data),))
        with store.session() as session:
            session.put(data)
            try:
                session.publish(TAG, manifest, expected=(before.raw,))
            except ConflictError:
                done.counts["lost"] += 1
            else:
                done.moves.append((before.digest.hex, manifest.digest.hex))
    return done


def check_moves(store: BucketStore, first: str, moves: list[tuple[str, str]]) -> None:
    """Assert that each move began where another ended: none was lost."""
    following = dict(moves)
    assert len(following) == len(moves), "two moves began at the same model"
    at, steps = first, 0
    while at in following:
        at, steps = following[at], steps + 1
    assert steps == len(moves)
    assert store.manifests.read(TAG).digest.hex == at


def check_whole(store: BucketStore) -> None:
    """Assert that no model lacks a blob and no blob is damaged."""
    found = verify(store)
    assert not [*found.damaged, *found.broken, *found.odd]


def main(address: str, options: str, what: str, seed: str, count: str, dies_at: str) -> None:
    """Do it, and print what each turn did; die before a write, counted from 1, or never."""
    bucket = HookedBucket(open_bucket(address, json.loads(options)))
    writes = itertools.count(1)

    def die(_key: str) -> None:
        if next(writes) == int(dies_at):
            os.kill(os.getpid(), signal.SIGKILL)

    bucket.before = die
    acts: dict[str, Callable[[BucketStore, object, int], Done]]
    acts = {"race": race, "models": come_and_go, "prune": prune}
    for turn in range(int(count)):
        done = acts[what](BucketStore(bucket), f"{seed} {turn}", 1)
        print(json.dumps({"counts": done.counts, "moves": done.moves}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
