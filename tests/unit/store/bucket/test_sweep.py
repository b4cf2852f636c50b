"""Prune in a bucket: what is removed, what is spared, and what waits for whom."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from support.buckets import HookedBucket, keys_of, memory_store, put_lease, same

from blobstore.errors import BlobStoreError, BusyError, StorageError, UsageError
from blobstore.formats.signatures import Signature
from blobstore.names import Digest
from blobstore.store.bucket import sweep
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.bucket.leases import Lease
from blobstore.store.bucket.object_keys import LEASES, SIGNATURES, SWEEP, blob_key, manifest_key
from blobstore.store.bucket.sweep import Sweep, prune_bucket
from blobstore.store.bucket.sweep_state import Phase, SweepGate, SweepState, read_state, write_state
from blobstore.store.care.prune import PruneResult
from blobstore.testing.blobs import M, N, blobs_of, commit, descriptor_of, manifest_of


def put_unneeded(store: BucketStore, *blobs: bytes) -> None:
    """Write blobs that no manifest names, and one model."""
    commit(store, "kept", b"kept")
    for data in blobs:
        store.bucket.put(blob_key(Digest.of(data)), data)


def prune_all(store: BucketStore) -> PruneResult:
    """Remove unneeded blobs of any age."""
    return prune_bucket(store, grace_s=0, sole_owner=True)


def left_in(store: BucketStore) -> set[bytes]:
    """Return the bytes of all blobs."""
    return {store.bucket.get(key)[0] for key in keys_of(store.bucket, "blobs/")}


def removed_by(result: PruneResult) -> set[Digest]:
    return {blob.digest for blob in result.removed}


def test_unneeded_blobs_are_removed() -> None:
    store = memory_store()
    put_unneeded(store, b"one", b"two")
    result = prune_all(store)
    assert removed_by(result) == {Digest.of(b"one"), Digest.of(b"two")}
    assert left_in(store) == {b"kept"}
    assert read_state(store.bucket).phase is Phase.IDLE
    assert keys_of(store.bucket, LEASES) == set()
    assert removed_by(prune_all(store)) == set()


def test_more_blobs_than_a_state_names_are_removed_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweep, "MOST_MARKED", 2)
    bucket = HookedBucket()
    store = BucketStore(bucket)
    unneeded = [b"%d" % number for number in range(5)]
    put_unneeded(store, *unneeded)
    named: set[int] = set()
    bucket.after = lambda key: named.add(len(read_state(bucket).blobs)) if key == SWEEP else None
    assert removed_by(prune_all(store)) == {Digest.of(data) for data in unneeded}
    assert (left_in(store), named) == ({b"kept"}, {0, 1, 2})


def test_young_blobs_are_spared() -> None:
    store = memory_store()
    put_unneeded(store, b"one")
    result = prune_bucket(store, grace_s=3600)
    assert (removed_by(result), [blob.size for blob in result.spared]) == (set(), [3])
    assert left_in(store) == {b"kept", b"one"}


def test_a_dry_run_writes_nothing() -> None:
    store = memory_store()
    put_unneeded(store, b"one")
    before = keys_of(store.bucket)
    result = prune_bucket(store, grace_s=0, sole_owner=True, dry_run=True)
    assert removed_by(result) == {Digest.of(b"one")}
    assert keys_of(store.bucket) == before


@pytest.mark.parametrize("grace_s", [-1, float("nan"), 3599])
def test_grace_times_that_are_too_short(grace_s: float) -> None:
    with pytest.raises(UsageError):
        prune_bucket(memory_store(), grace_s=grace_s)


# What a session needs


def test_what_a_session_writes_is_spared() -> None:
    store = memory_store(lease_s=60)
    put_unneeded(store, b"old")
    with same(store).session() as session:
        session.put(b"new")
        assert removed_by(prune_all(store)) == set()  # both are younger than the lease
        session.publish(M, manifest_of(b"new"))
    assert removed_by(prune_all(store)) == {Digest.of(b"old")}
    assert blobs_of(store, "m") == [b"new"]


def test_what_a_live_lease_names_is_spared_however_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_CLOCKS", timedelta(days=-1))  # all blobs are older than the lease
    store = memory_store()
    put_unneeded(store, b"old", b"older")
    key = put_lease(store.bucket, "other", lease_s=900)
    store.bucket.put(f"{key}.blobs", Digest.of(b"old").hex.encode())
    decision = Sweep(store, 0).decide(datetime.now(UTC))
    assert [blob.digest for blob in decision.spared] == [Digest.of(b"old")]
    assert [blob.digest for blob in decision.removed] == [Digest.of(b"older")]
    assert [lease.holder for lease in decision.waits_for] == ["another machine"]


def test_an_expired_lease_protects_nothing() -> None:
    store = memory_store()
    put_unneeded(store, b"one")
    put_lease(store.bucket, "dead", lease_s=0, began=0)
    assert removed_by(prune_all(store)) == {Digest.of(b"one")}


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b'{"lease_s": "x", "began": 1e99}', b"{}"])
def test_a_lease_that_can_not_be_read_counts(raw: bytes) -> None:
    store = memory_store()
    put_unneeded(store, b"one")
    store.bucket.put(f"{LEASES}odd", raw)
    (lease,) = Sweep(store, 0).decide(datetime.now(UTC)).waits_for
    assert lease.lease_s == 3600


def test_a_session_that_begins_while_blobs_are_marked_waits() -> None:
    store = memory_store(lease_s=0.5)
    put_unneeded(store, b"one")
    marked = SweepState(Phase.MARKED, "prune", 900, frozenset([Digest.of(b"one").hex]))
    state = write_state(store.bucket, marked)
    published = threading.Event()

    def work() -> None:
        with same(store).session() as session:
            session.put(b"one")
            session.publish(M, manifest_of(b"one"))
        published.set()

    worker = threading.Thread(target=work)
    worker.start()
    while not keys_of(store.bucket, LEASES):
        pass
    assert not published.is_set()
    store.bucket.delete([blob_key(Digest.of(b"one"))])
    write_state(store.bucket, SweepState(version=state.version))
    worker.join(60)
    assert published.is_set()
    assert blobs_of(store, "m") == [b"one"]


def test_a_session_does_not_wait_for_ever() -> None:
    store = memory_store()
    put_unneeded(store, b"one")
    write_state(
        store.bucket,
        SweepState(Phase.DELETING, "alice's prune", 900, frozenset([Digest.of(b"one").hex])),
    )
    impatient = BucketStore(store.bucket, wait_s=0)
    with impatient.session() as session, pytest.raises(BusyError, match="alice's prune"):
        session.put(b"one")
    commit(impatient, "n", b"another")
    assert blobs_of(store, "n") == [b"another"]


def test_a_dead_clean_up_is_ended() -> None:
    store = memory_store()
    put_unneeded(store, b"one")
    dead = SweepState(Phase.DELETING, "dead", 0.0, frozenset([Digest.of(b"one").hex]))
    write_state(store.bucket, dead)
    commit(store, "m", b"one")
    assert blobs_of(store, "m") == [b"one"]
    assert read_state(store.bucket).phase is Phase.IDLE


def test_two_clean_ups_do_not_run_at_once() -> None:
    store = memory_store()
    put_unneeded(store, b"one")
    write_state(store.bucket, SweepState(Phase.MARKED, "alice's", 900, frozenset("")))
    with pytest.raises(BusyError, match="alice's"):
        prune_all(store)
    assert left_in(store) == {b"kept", b"one"}


def test_a_clean_up_that_was_replaced_stops() -> None:
    bucket = HookedBucket()
    store = BucketStore(bucket)
    put_unneeded(store, b"one")
    waiting = [SWEEP]

    def replace(key: str) -> None:
        """Another process takes this one for dead, just before it deletes."""
        if key == SWEEP and waiting and read_state(bucket).phase is Phase.MARKED:
            waiting.clear()
            write_state(bucket, SweepState(version=read_state(bucket).version))

    bucket.before = replace
    with pytest.raises(BusyError):
        prune_all(store)
    assert left_in(store) == {b"kept", b"one"}
    assert read_state(bucket).phase is Phase.IDLE


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"phase": "x"}', b'{"blobs": [1]}', b"\xff"])
def test_a_state_that_can_not_be_read_stops_sessions_and_clean_ups(raw: bytes) -> None:
    store = memory_store()
    put_unneeded(store, b"one")
    store.bucket.put(SWEEP, raw)
    with pytest.raises(BusyError, match="not the state of a clean-up"):
        prune_all(store)
    with pytest.raises(BusyError):
        commit(store, "m", b"two")
    assert left_in(store) == {b"kept", b"one"}
    assert keys_of(store.bucket, LEASES) == set()


def test_a_model_that_is_published_after_the_mark_keeps_its_blobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its session has checked its blobs before the mark, and its lease is all that is seen of it.

    Nothing else spares them: they are old, and their names are not written yet.
    """
    monkeypatch.setattr(sweep, "_CLOCKS", timedelta(days=-1))
    monkeypatch.setattr(sweep, "_LOOK_S", 0.02)
    bucket = HookedBucket()
    store = BucketStore(bucket, lease_s=60)
    put_unneeded(store, b"one", b"two")
    marked, arrived = threading.Event(), threading.Event()

    def after(key: str) -> None:
        if key == SWEEP and read_state(bucket).phase is Phase.MARKED:
            assert read_state(bucket).takes([Digest.of(b"one")])
            marked.set()

    bucket.after = after
    slow = BucketStore(HookedLike(bucket, marked, arrived), lease_s=60)
    worker = threading.Thread(target=lambda: commit(slow, "m", b"one"))
    worker.start()
    assert arrived.wait(60)  # it is about to move its tag
    assert removed_by(prune_all(store)) == {Digest.of(b"two")}
    worker.join(60)
    assert blobs_of(store, "m") == [b"one"]


def test_a_session_and_a_clean_up_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session began before the mark, so it is waited for; it needs a blob that is marked."""
    monkeypatch.setattr(sweep, "_CLOCKS", timedelta(days=-1))
    monkeypatch.setattr(sweep, "_LOOK_S", 0.02)
    store = memory_store(lease_s=300)
    put_unneeded(store, b"one", b"two")
    with same(store).session() as session, ThreadPoolExecutor(1) as threads:
        pruned = threads.submit(prune_all, store)
        while read_state(store.bucket).phase is not Phase.MARKED:
            pass
        session.put(b"one")
        session.publish(M, manifest_of(b"one"))
        assert read_state(store.bucket).phase is Phase.MARKED  # and waits for the session
        session._lease.close()
        assert removed_by(pruned.result()) == {Digest.of(b"two")}
    assert blobs_of(store, "m") == [b"one"]


class HookedLike(HookedBucket):
    """The same objects as those of a bucket; moving a tag waits for an event."""

    def __init__(
        self, other: HookedBucket, goes_on: threading.Event, arrived: threading.Event
    ) -> None:
        super().__init__()
        self.address, self.store = other.address, other.store

        def wait(key: str) -> None:
            if key == manifest_key(M):
                arrived.set()
                goes_on.wait(60)

        self.before = wait


def test_a_lapsed_lease_makes_a_session_check_all_its_blobs() -> None:
    store = memory_store()
    with store.session() as session:
        session.put(b"one")
        store.bucket.delete([blob_key(Digest.of(b"one"))])  # as a clean-up after the lease expired
        lease: Lease = session._lease
        lease._renewed_at -= 10_000
        assert lease.has_lapsed
        with pytest.raises(BlobStoreError, match="is missing"):
            session.publish(M, manifest_of(b"one"))
    assert store.manifests.names() == []


def test_pins_are_written_with_the_next_renewal() -> None:
    store = memory_store()
    commit(store, "m", b"one")
    with same(store).session() as session:
        session.missing([descriptor_of(b"one")])
        session._lease.renew()
        (pins,) = (key for key in keys_of(store.bucket, LEASES) if key.endswith(".blobs"))
        assert store.bucket.get(pins)[0].decode() == Digest.of(b"one").hex
    assert keys_of(store.bucket, LEASES) == set()


def test_a_gate_sees_a_mark() -> None:
    store = memory_store()
    lease = Lease(store.bucket, 900)
    try:
        gate = SweepGate(store.bucket, lease, 0)
        gate.recent([Digest.of(b"one")])
        blobs = frozenset([Digest.of(b"one").hex])
        write_state(store.bucket, SweepState(Phase.MARKED, "x", 900, blobs))
        with pytest.raises(BusyError):
            gate.passed([Digest.of(b"one")])
        gate.passed([Digest.of(b"two")])
    finally:
        lease.close()


# Obstacles


@pytest.mark.parametrize(
    "key",
    [
        "manifests/stray",
        "manifests/a/b/c/d/e",
        "manifests/registry.ollama.ai/library/m/la test",
        "manifests-v2/ollama.com/library/m/latest",
    ],
)
def test_an_object_that_may_be_a_manifest_stops_a_clean_up(key: str) -> None:
    store = memory_store()
    put_unneeded(store, b"one")
    store.bucket.put(key, b"?")
    with pytest.raises(StorageError, match="may be a manifest"):
        prune_all(store)
    assert left_in(store) == {b"kept", b"one"}


def test_empty_objects_of_folders_are_not_manifests() -> None:
    store = memory_store()
    put_unneeded(store, b"one")
    for key in ("manifests", "manifests/registry.ollama.ai", "manifests-v2"):
        store.bucket.put(key, b"")
    assert removed_by(prune_all(store)) == {Digest.of(b"one")}


@pytest.mark.parametrize("raw", [b"", b"{}", b"{" * 1000])
def test_a_broken_manifest_stops_a_clean_up(raw: bytes) -> None:
    store = memory_store()
    put_unneeded(store, b"one")
    store.bucket.put(manifest_key(N), raw)
    with pytest.raises(BlobStoreError, match="n:latest can't be read"):
        prune_all(store)
    assert left_in(store) == {b"kept", b"one"}


def test_a_bucket_without_models_is_not_emptied() -> None:
    store = memory_store()
    store.bucket.put(blob_key(Digest.of(b"one")), b"one")
    with pytest.raises(StorageError, match="no model has a manifest"):
        prune_all(store)
    assert left_in(store) == {b"one"}
    prune_bucket(store, grace_s=0, sole_owner=True, forget=True)
    assert left_in(store) == set()


def test_a_bucket_without_the_blobs_of_its_models() -> None:
    store = memory_store()
    commit(store, "m", b"one")
    store.bucket.delete([blob_key(Digest.of(b"one"))])
    store.bucket.put(blob_key(Digest.of(b"two")), b"two")
    with pytest.raises(StorageError, match="has none of them"):
        prune_all(store)
    assert left_in(store) == {b"two"}


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
