"""Prune in a bucket: what is removed, what is spared, and who waits for whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support.buckets import HookedBucket, keys_of, memory_store, put_lease, same

from blobstore.errors import (
    BlobStoreError,
    BusyError,
    NotFoundError,
    StorageError,
)
from blobstore.formats.signatures import Signature
from blobstore.formats.strictjson import encode
from blobstore.io.objects import Bucket
from blobstore.names import Digest
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.bucket.leases import Lease, read_sweep
from blobstore.store.bucket.objects import LEASES, SIGNATURES, SWEEP, blob_key, manifest_key
from blobstore.store.care.prune import PruneResult, prune
from blobstore.testing.blobs import M, N, blobs_of, commit, manifest_of


def put_unneeded(store: BucketStore, *blobs: bytes) -> None:
    """Write blobs that no manifest names, and one model."""
    commit(store, "kept", b"kept")
    for data in blobs:
        store.bucket.put(blob_key(Digest.of(data)), data)


@pytest.fixture
def store() -> BucketStore:
    """A store with one model, and one blob that no manifest names."""
    store = memory_store()
    put_unneeded(store, b"one")
    return store


def prune_all(store: BucketStore) -> PruneResult:
    """Remove unneeded blobs of any age."""
    return prune(store, grace_s=0, sole_owner=True, wait_s=0)


def left_in(store: BucketStore) -> set[bytes]:
    """Return the bytes of all blobs."""
    return {store.bucket.get(key)[0] for key in keys_of(store.bucket, "blobs/")}


def removed_by(result: PruneResult) -> set[Digest]:
    return {blob.digest for blob in result.removed}


def put_sweep(bucket: Bucket, phase: str, *, lease_s: float, blobs: tuple[bytes, ...] = ()) -> None:
    """Write the state of a clean-up, as older versions did, too."""
    said = {"phase": phase, "holder": "alice's prune", "lease_s": lease_s, "at": "1"}
    bucket.put(SWEEP, encode(said | {"blobs": [Digest.of(data).hex for data in blobs]}))


def test_unneeded_blobs_are_removed() -> None:
    store = memory_store()
    put_unneeded(store, b"one", b"two")
    result = prune_all(store)
    assert removed_by(result) == {Digest.of(b"one"), Digest.of(b"two")}
    assert left_in(store) == {b"kept"}
    assert read_sweep(store.bucket)[1] is None
    assert keys_of(store.bucket, LEASES) == set()
    assert removed_by(prune_all(store)) == set()


def test_young_blobs_are_spared(store: BucketStore) -> None:
    result = prune(store, grace_s=3600)
    assert (removed_by(result), [blob.size for blob in result.spared]) == (set(), [3])
    assert left_in(store) == {b"kept", b"one"}


def test_a_dry_run_writes_nothing(store: BucketStore) -> None:
    before = keys_of(store.bucket)
    result = prune(store, grace_s=0, sole_owner=True, dry_run=True)
    assert removed_by(result) == {Digest.of(b"one")}
    assert keys_of(store.bucket) == before


# The order of leases


def test_a_clean_up_refuses_beside_a_session_and_runs_after_it() -> None:
    store = memory_store(lease_s=60)
    put_unneeded(store, b"old")
    with same(store).session() as session:
        session.put(b"new")
        with pytest.raises(BusyError, match="is being written to by"):
            prune_all(store)
        assert left_in(store) == {b"kept", b"old", b"new"}
        session.publish(M, manifest_of(b"new"))
    assert removed_by(prune_all(store)) == {Digest.of(b"old")}
    assert blobs_of(store, "m") == [b"new"]


def test_a_clean_up_waits_for_a_session_that_was_there_before_it() -> None:
    bucket = HookedBucket()
    store = BucketStore(bucket)
    put_unneeded(store, b"one")
    with ThreadPoolExecutor(1) as pool:
        with same(store).session() as session:
            session.put(b"one")
            looks = threading.Event()
            bucket.after = lambda key: looks.set() if key == SWEEP else None
            waiting = pool.submit(lambda: prune(store, grace_s=0, sole_owner=True, wait_s=600))
            assert looks.wait(600)
            session.publish(M, manifest_of(b"one"))
        assert removed_by(waiting.result()) == set()
    assert blobs_of(store, "m") == [b"one"]


def test_a_session_waits_for_a_clean_up_that_was_there_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins when the clean-up is about to remove a blob, which it then writes again."""
    store = BucketStore(HookedBucket())
    put_unneeded(store, b"one")
    other = HookedBucket(same(store).bucket)
    asks = threading.Event()
    other.after = lambda key: asks.set() if key.startswith(LEASES) else None
    delete = store.bucket.delete
    with ThreadPoolExecutor(1) as pool:
        begun: list[Future[set[Digest]]] = []

        def begins(keys: list[str]) -> None:
            if blob_key(Digest.of(b"one")) in keys:
                begun.append(pool.submit(commit, BucketStore(other), "m", b"one"))
                assert asks.wait(600)
            delete(keys)

        monkeypatch.setattr(store.bucket, "delete", begins)
        assert removed_by(prune_all(store)) == {Digest.of(b"one")}
        assert begun[0].result() == {Digest.of(b"one")}
    assert blobs_of(store, "m") == [b"one"]


@pytest.mark.parametrize("phase", ["deleting", "idle"])
def test_what_a_killed_clean_up_left_is_ended(phase: str) -> None:
    """Also one of an older version, which named blobs."""
    store = memory_store()
    put_unneeded(store, b"one", b"two")
    put_sweep(store.bucket, phase, lease_s=0, blobs=(b"one",))
    commit(store, "m", b"one")
    assert blobs_of(store, "m") == [b"one"]
    put_sweep(store.bucket, phase, lease_s=0, blobs=(b"one",))
    assert removed_by(prune_all(store)) == {Digest.of(b"two")}
    assert read_sweep(store.bucket)[1] is None


def test_leases_of_killed_sessions(store: BucketStore) -> None:
    put_lease(store.bucket, "live", lease_s=900)
    with pytest.raises(BusyError, match="another machine"):
        prune_all(store)
    put_lease(store.bucket, "live", lease_s=0)
    assert removed_by(prune_all(store)) == {Digest.of(b"one")}


@pytest.mark.parametrize("raw", [b"\xff", b'{"lease_s": "x"}'])
def test_a_lease_that_can_not_be_read_counts(store: BucketStore, raw: bytes) -> None:
    store.bucket.put(f"{LEASES}odd", raw)
    with pytest.raises(BusyError):
        prune_all(store)


@pytest.mark.parametrize("raw", [b"{}", b"\xff"])
def test_a_state_that_can_not_be_read_stops_sessions_and_clean_ups(
    store: BucketStore, raw: bytes
) -> None:
    store.bucket.put(SWEEP, raw)
    with pytest.raises(BusyError, match="not the state of a clean-up"):
        prune_all(store)
    with pytest.raises(BusyError):
        commit(store, "m", b"two")
    assert left_in(store) == {b"kept", b"one"}
    assert keys_of(store.bucket, LEASES) == set()


def test_a_clean_up_that_was_taken_for_dead_stops() -> None:
    bucket = HookedBucket()
    store = BucketStore(bucket)
    put_unneeded(store, b"one")
    writes: list[str] = []

    def replace(key: str) -> None:
        """Another process ends it, just before it deletes."""
        writes.append(key)
        if writes.count(SWEEP) == 3:
            put_sweep(same(store).bucket, "idle", lease_s=0)

    bucket.before = replace
    with pytest.raises(BusyError):
        prune_all(store)
    assert left_in(store) == {b"kept", b"one"}


def test_a_lease_is_renewed_while_its_session_lives() -> None:
    bucket, renewed = HookedBucket(), threading.Event()
    written: list[str] = []

    def note(key: str) -> None:
        written.append(key)
        if len(written) > 2:
            renewed.set()

    bucket.after = note
    lease = Lease(bucket, 0.2)
    assert renewed.wait(600)
    lease.close()
    assert set(written) == {lease.key}
    assert not keys_of(bucket, LEASES)


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which the machine seems to have slept for three hours."""
    clock = time.clock_gettime

    def wake() -> None:
        monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + 10_000)

    return wake


def test_a_session_whose_lease_has_lapsed_checks_all_its_blobs(sleep: Callable[[], None]) -> None:
    store = memory_store()
    with store.session() as session:
        session.put(b"one")
        sleep()
        store.bucket.delete([blob_key(Digest.of(b"one"))])  # as a clean-up after the lease expired
        with pytest.raises(NotFoundError, match="is missing"):
            session.publish(M, manifest_of(b"one"))
    assert store.manifests.names() == []


def test_a_session_whose_lease_has_lapsed_waits_for_a_clean_up(sleep: Callable[[], None]) -> None:
    store = BucketStore(memory_store().bucket, wait_s=0)
    with store.session() as session:
        session.put(b"one")
        sleep()
        put_sweep(store.bucket, "deleting", lease_s=900)
        with pytest.raises(BusyError, match="alice's prune"):
            session.publish(M, manifest_of(b"one"))
        put_sweep(store.bucket, "idle", lease_s=900)
        session.publish(M, manifest_of(b"one"))
    assert blobs_of(store, "m") == [b"one"]


# Obstacles


@pytest.mark.parametrize(
    "key",
    ["manifests/registry.ollama.ai/library/m/la test", "manifests-v2/ollama.com/library/m/latest"],
)
def test_an_object_that_may_be_a_manifest_stops_a_clean_up(store: BucketStore, key: str) -> None:
    store.bucket.put(key, b"?")
    with pytest.raises(StorageError, match="may be a manifest"):
        prune_all(store)
    assert left_in(store) == {b"kept", b"one"}


def test_empty_objects_of_folders_are_not_manifests(store: BucketStore) -> None:
    for key in ("manifests", "manifests/registry.ollama.ai", "manifests-v2"):
        store.bucket.put(key, b"")
    assert removed_by(prune_all(store)) == {Digest.of(b"one")}


@pytest.mark.parametrize("raw", [b"", b"{" * 1000])
def test_a_broken_manifest_stops_a_clean_up(store: BucketStore, raw: bytes) -> None:
    store.bucket.put(manifest_key(N), raw)
    with pytest.raises(BlobStoreError, match="n:latest can't be read"):
        prune_all(store)
    assert left_in(store) == {b"kept", b"one"}


def test_a_bucket_without_the_blobs_of_its_models() -> None:
    store = memory_store()
    commit(store, "m", b"one")
    store.bucket.delete([blob_key(Digest.of(b"one"))])
    store.bucket.put(blob_key(Digest.of(b"two")), b"two")
    with pytest.raises(StorageError, match="contains none of them"):
        prune_all(store)
    assert left_in(store) == {b"two"}


def test_a_bucket_without_any_models_is_not_emptied() -> None:
    """Its manifests may be at another prefix, or not copied yet."""
    store = memory_store()
    store.bucket.put(blob_key(Digest.of(b"one")), b"one")
    with pytest.raises(StorageError, match="no model has a manifest"):
        prune_all(store)
    assert left_in(store) == {b"one"}
    prune(store, grace_s=0, sole_owner=True, forget=True)
    assert left_in(store) == set()


def test_signatures_of_removed_models_go() -> None:
    store = memory_store()
    commit(store, "m", b"one")
    commit(store, "n", b"two")
    for data in (b"one", b"two"):
        digest = manifest_of(data).digest
        store.signatures.add(M, digest, [Signature.of(b"payload", data)])
    store.remove("m")
    prune_all(store)
    (left,) = keys_of(store.bucket, SIGNATURES)
    assert manifest_of(b"two").digest.hex in left
