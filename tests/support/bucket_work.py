"""Work on one bucket by several processes: models that come, go and share blobs; races for a tag.

A program too: ``python -m support.bucket_work ADDRESS OPTIONS WHAT SEED COUNT LEASE_S``. It prints
what it did as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from blobstore.errors import BusyError, ConflictError, NotFoundError
from blobstore.formats.documents import Manifest
from blobstore.io.objects import Bucket, open_bucket
from blobstore.names import ModelName
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.care.prune import prune as prune_once
from blobstore.store.care.verify import verify
from blobstore.testing.blobs import data_of, descriptor_of

NAMES = 12
BLOBS = 40
"""Blobs that all models share: most are there already, and many are just being removed."""
TAG = ModelName.parse("raced")


@dataclass(slots=True)
class Done:
    """What a process did: how often; the moves of a tag that succeeded; what it found wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    moves: list[tuple[str, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def blob(number: int) -> bytes:
    """Return one of the shared blobs."""
    return data_of(50 + number, number)


def model_of(numbers: list[int]) -> Manifest:
    """Return the manifest of a model with these blobs."""
    return Manifest(layers=tuple(descriptor_of(blob(number), str(number)) for number in numbers))


def come_and_go(store: BucketStore, seed: object, count: int) -> Done:
    """Make, copy and remove models at random; check each that was made."""
    random, done = Random(f"{seed}"), Done()
    for _ in range(count):
        name = ModelName.parse(f"m{random.randrange(NAMES)}")
        what = random.choice(("make", "make", "find", "copy", "remove"))
        try:
            {"make": make, "find": make, "copy": copy, "remove": remove}[what](store, name, random)
            done.counts[what] += 1
        except (ConflictError, BusyError, NotFoundError) as error:
            done.counts[f"{what}: {type(error).__name__}"] += 1
    return done


def make(store: BucketStore, name: ModelName, random: Random) -> None:
    """Publish a model: its blobs are made, or found as those of an earlier session."""
    numbers = random.sample(range(BLOBS), 3)
    manifest = model_of(numbers)
    with store.session() as session:
        for number in numbers:
            key = f"{number:064x}"
            if session.recall(key, 50 + number, verify=False) is None:
                session.note(key, session.put(blob(number)))
        session.publish(store.target(name), manifest)


def copy(store: BucketStore, name: ModelName, random: Random) -> None:
    """Give another model this name."""
    with store.session() as session:
        manifest = store.manifests.read(ModelName.parse(f"m{random.randrange(NAMES)}"))
        session.publish(store.target(name), manifest)


def remove(store: BucketStore, name: ModelName, _random: Random) -> None:
    """Remove a model."""
    store.remove(name)


def prune(store: BucketStore, count: int) -> Done:
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
            except ConflictError as error:
                done.counts["lost"] += 1
                done.counts["named"] += "it is sha256:" in error.message
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


def check_whole(store: BucketStore) -> int:
    """Assert that no model lacks a blob and no blob is damaged; return how many models there are.

    Blobs that no model needs are right, too.
    """
    found = verify(store)
    wrong = [*found.damaged, *found.broken, *found.odd]
    assert not wrong, f"{wrong}"
    return len(store.manifests.names())


def store_of(address: str, options: Mapping[str, str], lease_s: float) -> BucketStore:
    """Return the store at an address, which waits long for clean-ups."""
    bucket: Bucket = open_bucket(address, options)
    return BucketStore(bucket, lease_s=lease_s, wait_s=60)


def main(address: str, options: str, what: str, seed: str, count: str, lease_s: str) -> None:
    """Do it, and print what was done."""
    store = store_of(address, json.loads(options), float(lease_s))
    if what == "prune":
        done = prune(store, int(count))
    else:
        done = {"race": race, "models": come_and_go}[what](store, seed, int(count))
    print(json.dumps({"counts": done.counts, "moves": done.moves}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
