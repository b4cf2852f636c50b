"""Prune in a bucket: what is removed, what is spared, and who waits for whom."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support.buckets import HookedBucket, keys_of, same

from blobstore.errors import BlobStoreError, BusyError, NotFoundError, StorageError
from blobstore.formats.oci import Signature
from blobstore.formats.strictjson import encode
from blobstore.io.objects import Bucket
from blobstore.names import Digest
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.bucket.leases import Lease, read_sweep
from blobstore.store.bucket.objects import LEASES, SIGNATURES, SWEEP, blob_key, manifest_key
from blobstore.store.care.prune import prune
from blobstore.testing.blobs import M, N, blobs_of, commit, manifest_of


@pytest.fixture
def bucket() -> HookedBucket:
    return HookedBucket()


@pytest.fixture
def store(bucket: HookedBucket) -> BucketStore:
    """A store with a model and a blob that no manifest names."""
    store = BucketStore(bucket)
    commit(store, "kept", b"kept")
    bucket.put(blob_key(Digest.of(b"one")), b"one")
    return store


def prune_all(store: BucketStore, wait_s: float = 0) -> set[Digest]:
    """Remove unneeded blobs of any age; return which."""
    result = prune(store, grace_s=0, sole_owner=True, wait_s=wait_s)
    return {blob.digest for blob in result.removed}


def left_in(store: BucketStore) -> set[bytes]:
    return {store.bucket.get(key)[0] for key in keys_of(store.bucket, "blobs/")}


def put_sweep(bucket: Bucket, phase: str, *, lease_s: float) -> None:
    """Write the state of a clean-up, as older versions did, which named blobs."""
    said = {"phase": phase, "holder": "alice's prune", "lease_s": lease_s, "at": "1"}
    bucket.put(SWEEP, encode(said | {"blobs": [Digest.of(b"one").hex]}))


def test_unneeded_blobs_are_removed(store: BucketStore) -> None:
    before = keys_of(store.bucket)
    result = prune(store, grace_s=0, sole_owner=True, dry_run=True)
    assert len(result.removed) == 1
    assert keys_of(store.bucket) == before
    assert prune_all(store) == {Digest.of(b"one")}
    assert left_in(store) == {b"kept"}
    assert read_sweep(store.bucket)[1] is None
    assert keys_of(store.bucket, LEASES) == set()
    assert prune_all(store) == set()


def test_young_blobs_are_spared(store: BucketStore) -> None:
    result = prune(store, grace_s=3600)
    assert (result.removed, [blob.size for blob in result.spared]) == ((), [3])
    assert left_in(store) == {b"kept", b"one"}


def test_a_clean_up_refuses_beside_a_session_and_runs_after_it(store: BucketStore) -> None:
    with same(store).session() as session:
        session.put(b"new")
        with pytest.raises(BusyError):
            prune_all(store)
        assert left_in(store) == {b"kept", b"one", b"new"}
        session.publish(M, manifest_of(b"new"))
    assert prune_all(store) == {Digest.of(b"one")}
    assert blobs_of(store, "m") == [b"new"]


def test_a_clean_up_waits_for_sessions(bucket: HookedBucket, store: BucketStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        with same(store).session() as session:
            session.put(b"one")
            looks = threading.Event()
            bucket.after = lambda key: looks.set() if key == SWEEP else None
            waiting = pool.submit(prune_all, store, wait_s=600)
            assert looks.wait(600)
            session.publish(M, manifest_of(b"one"))
        assert waiting.result() == set()
    assert blobs_of(store, "m") == [b"one"]


def test_sessions_wait_for_a_clean_up(store: BucketStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins when the clean-up is about to remove a blob, which it then writes again."""
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
        assert prune_all(store) == {Digest.of(b"one")}
        assert begun[0].result() == {Digest.of(b"one")}
    assert blobs_of(store, "m") == [b"one"]


@pytest.mark.parametrize("phase", ["deleting", "idle"])
def test_what_a_killed_clean_up_left_is_ended(store: BucketStore, phase: str) -> None:
    store.bucket.put(blob_key(Digest.of(b"two")), b"two")
    put_sweep(store.bucket, phase, lease_s=0)
    commit(store, "m", b"one")
    put_sweep(store.bucket, phase, lease_s=0)
    assert prune_all(store) == {Digest.of(b"two")}
    assert blobs_of(store, "m") == [b"one"]
    assert read_sweep(store.bucket)[1] is None


def test_leases_of_killed_sessions(store: BucketStore) -> None:
    lease = {"holder": "another machine", "lease_s": 900}
    store.bucket.put(f"{LEASES}killed", encode(lease))
    with pytest.raises(BusyError, match="another machine"):
        prune_all(store)
    store.bucket.put(f"{LEASES}killed", encode(lease | {"lease_s": 0}))
    assert prune_all(store) == {Digest.of(b"one")}


@pytest.mark.parametrize("raw", [b"\xff", b"{}"])
def test_a_lease_or_state_that_can_not_be_read_counts(store: BucketStore, raw: bytes) -> None:
    store.bucket.put(f"{LEASES}odd", raw)
    with pytest.raises(BusyError):
        prune_all(store)
    store.bucket.delete([f"{LEASES}odd"])
    store.bucket.put(SWEEP, raw)
    with pytest.raises(BusyError, match="state of a prune"):
        prune_all(store)
    with pytest.raises(BusyError, match="state of a prune"):
        commit(store, "m", b"two")
    assert left_in(store) == {b"kept", b"one"}
    assert keys_of(store.bucket, LEASES) == set()


def test_a_clean_up_that_was_taken_for_dead_stops(bucket: HookedBucket, store: BucketStore) -> None:
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


def test_a_lease_is_renewed_while_its_session_lives(bucket: HookedBucket) -> None:
    renewed = threading.Event()
    written: list[str] = []

    def note(key: str) -> None:
        written.append(key)
        if len(written) > 2:
            renewed.set()

    bucket.after = note
    lease = Lease(bucket, 0.2)  # a short one is renewed soon; nobody asks whether it lapsed
    assert renewed.wait(600)
    lease.close()
    assert set(written) == {lease.key}
    assert not keys_of(bucket, LEASES)


def test_a_lapsed_session_checks_blobs(store: BucketStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the machine had been asleep for three hours."""
    clock = time.clock_gettime
    with store.session() as session:
        session.put(b"new")
        monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + 10_000)
        store.bucket.delete([blob_key(Digest.of(b"new"))])  # as a clean-up after the lease expired
        with pytest.raises(NotFoundError):
            session.publish(M, manifest_of(b"new"))


@pytest.mark.parametrize(
    ("key", "raw", "error"),
    [
        ("manifests/registry.ollama.ai/library/m/la test", b"?", StorageError),
        ("manifests-v2/ollama.com/library/m/latest", b"?", StorageError),
        (manifest_key(N), b"", BlobStoreError),
    ],
)
def test_what_may_be_a_manifest_stops_a_clean_up(
    store: BucketStore, key: str, raw: bytes, error: type[BlobStoreError]
) -> None:
    store.bucket.put(key, raw)
    with pytest.raises(error, match=r"manifest|n:latest"):
        prune_all(store)
    assert left_in(store) == {b"kept", b"one"}


def test_a_bucket_without_the_blobs_of_its_models(store: BucketStore) -> None:
    store.bucket.delete([blob_key(Digest.of(b"kept")), blob_key(Digest.of(b"{}"))])
    with pytest.raises(StorageError):
        prune_all(store)
    assert left_in(store) == {b"one"}


def test_a_bucket_without_any_models_is_not_emptied(store: BucketStore) -> None:
    """Its manifests may be at another prefix, or not copied yet."""
    store.remove("kept")
    with pytest.raises(StorageError):
        prune_all(store)
    assert left_in(store) == {b"kept", b"one"}
    prune(store, grace_s=0, sole_owner=True, forget=True)
    assert left_in(store) == set()


def test_signatures_of_removed_models_go(store: BucketStore) -> None:
    for name, data in (("m", b"one"), ("n", b"two")):
        commit(store, name, data)
        store.signatures.add(M, manifest_of(data).digest, [Signature.of(b"payload", data)])
    store.remove("m")
    prune_all(store)
    (left,) = keys_of(store.bucket, SIGNATURES)
    assert manifest_of(b"two").digest.hex in left
