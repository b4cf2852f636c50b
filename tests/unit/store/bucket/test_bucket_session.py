"""Sessions of a bucket: conditional writes, races for a tag, what other machines find."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support import PYCODE
from support.buckets import CarelessBucket, HookedBucket, keys_of, memory_store, same
from support.checkpoints import normal, safetensors_bytes
from support.stores import commit_model, stored_arrays

from blobstore.errors import (
    ConflictError,
    CorruptDataError,
    DigestMismatchError,
    RemoteError,
    StorageError,
)
from blobstore.formats.documents import Descriptor
from blobstore.importer.run import make_blob, plan_import, run_plan
from blobstore.io.ranges import BytesReader
from blobstore.names import Digest
from blobstore.store.bucket import objects
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.bucket.objects import (
    LEASES,
    MADE,
    MANIFESTS,
    PROBES,
    blob_key,
    manifest_key,
)
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store
from blobstore.testing.blobs import M, N, blobs_of, commit, data_of, descriptor_of, manifest_of


def test_a_copy_of_the_prefix_is_a_store(tmp_path: Path) -> None:
    store = memory_store()
    for name in ("m", "host.example:5000/ns/m:tag"):
        commit(store, name, b"one", data_of(70_000), with_config=False)
    with store.session() as session:
        session.note("1" * 64, session.put(b"unpublished"))
    for key in keys_of(store.bucket):
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.bucket.get(key)[0])
    copy = Store(tmp_path)
    assert copy.manifests.names() == store.manifests.names()
    assert blobs_of(copy, "m") == [b"one", data_of(70_000)]
    found = verify(copy)
    assert [blob.reason for blob in found.damaged if blob.models] == []
    assert (found.broken, found.odd) == ((), ())


@pytest.mark.parametrize("quick", [False, True])
def test_a_wrong_type_in_metadata_is_odd(*, quick: bool) -> None:
    store = memory_store()
    arrays, metadata = stored_arrays("w", normal("w", 4, 128), "int8")
    commit_model(store, "m", safetensors_bytes(arrays, metadata | {"quant_type": "int4"}))
    for names in ([], ["m"]):
        result = verify(store, names, quick=quick)
        assert result.is_sound
        (odd,) = result.odd
        assert odd.reason.startswith("its bytes are whole, but tensor 'w' of type int4")


def test_a_killed_session_leaves_nothing_visible() -> None:
    store = memory_store()
    with store.session() as session:
        session.put(b"one")
        seen = same(store)
        assert keys_of(store.bucket, "blobs/") == {blob_key(Digest.of(b"one"))}
        assert seen.manifests.names() == []
        assert seen.blobs.digests() == set()
    commit(seen, "m", b"one")
    assert blobs_of(store, "m") == [b"one"]


def test_a_session_leaves_no_lease() -> None:
    store = memory_store()
    with store.session():
        assert len(keys_of(store.bucket, LEASES)) == 1
    assert keys_of(store.bucket) == set()


@pytest.mark.parametrize("checks_absence", [False, True])
def test_a_service_without_conditions_is_refused(checks_absence: bool) -> None:
    bucket = CarelessBucket(checks_absence=checks_absence)
    with pytest.raises(StorageError, match="ignores conditional writes"):
        commit(BucketStore(bucket), "m", b"one")
    assert keys_of(bucket) == set()


# A tag


def test_a_lost_race_says_which_model_won() -> None:
    bucket = HookedBucket()
    slow, fast = BucketStore(bucket), BucketStore(bucket)
    waiting = [manifest_key(M)]

    def race(key: str) -> None:
        if key in waiting:
            waiting.remove(key)
            commit(fast, "m", b"fast", b"er")

    bucket.before = race
    with pytest.raises(ConflictError) as caught:
        commit(slow, "m", b"slow")
    assert str(manifest_of(b"fast", b"er").digest) in caught.value.message
    assert caught.value.model == "m:latest"
    assert blobs_of(fast, "m") == [b"fast", b"er"]


def test_a_race_against_a_removal() -> None:
    bucket = HookedBucket()
    store = BucketStore(bucket)
    commit(store, "m", b"one")
    waiting = [manifest_key(M)]

    def remove(key: str) -> None:
        if key in waiting:
            waiting.remove(key)
            store.manifests.remove(M)

    bucket.before = remove
    with pytest.raises(ConflictError, match="removed m:latest meanwhile"):
        commit(store, "m", b"two")
    assert store.manifests.names() == []


def test_an_answer_that_is_lost_is_not_a_lost_race() -> None:
    bucket = HookedBucket()
    waiting = [manifest_key(M)]

    def lose(key: str) -> None:
        """The service wrote it, and the retry finds it: obstore raises as if another had."""
        if key in waiting:
            waiting.remove(key)
            raise ConflictError("it is there")

    bucket.after = lose
    store = BucketStore(bucket)
    assert commit(store, "m", b"one", expected=(None,)) == {Digest.of(b"one")}
    assert blobs_of(store, "m") == [b"one"]


@pytest.mark.parametrize("folder", [PROBES, MANIFESTS])
def test_no_lost_answer_is_another_writer(folder: str) -> None:
    """A service that writes and then answers 500: the retry finds what the first request wrote."""
    bucket = HookedBucket()
    written: set[str] = set()

    def lose(key: str) -> None:
        if key.startswith(folder) and key not in written:
            written.add(key)
            raise ConflictError("it is there")

    bucket.after = lose
    store = BucketStore(bucket)
    commit(store, "m", b"one")
    assert written
    written.clear()
    commit(store, "m", b"two")
    assert blobs_of(store, "m") == [b"two"]


def test_a_write_that_is_refused_for_a_while_is_sent_again() -> None:
    """S3 answers 409 while another request for the object goes on."""
    bucket = HookedBucket()
    waiting = [manifest_key(M)] * 3

    def refuse(key: str) -> None:
        if key in waiting:
            waiting.remove(key)
            raise ConflictError("a conflicting operation is in progress")

    bucket.before = refuse
    commit(BucketStore(bucket), "m", b"one")
    assert not waiting


def test_a_manifest_that_can_not_be_written_changes_nothing() -> None:
    bucket = HookedBucket()
    store = BucketStore(bucket)
    commit(store, "m", b"one")

    def fail(key: str) -> None:
        if key == manifest_key(M):
            raise RemoteError("no answer", temporary=True)

    bucket.before = fail
    with pytest.raises(RemoteError):
        commit(store, "m", b"two")
    assert blobs_of(store, "m") == [b"one"]
    assert keys_of(bucket, LEASES) == set()


def test_moved_and_copied_names() -> None:
    store = memory_store()
    commit(store, "m", b"one")
    assert store.copy("m", "n") == N
    assert blobs_of(store, "n") == [b"one"]
    store.remove("m")
    assert store.move("n", "m") == M
    assert store.manifests.names() == [M]
    assert blobs_of(store, "m") == [b"one"]


# Blobs


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs of over 1000 bytes are written in parts."""
    monkeypatch.setattr(objects, "SMALL", 1000)


@pytest.mark.usefixtures("parts")
def test_a_large_blob_in_parts() -> None:
    store, data = memory_store(), data_of(5_000_000)
    with store.session() as session:
        session.add(descriptor_of(data), BytesReader(data))
        session.publish(M, manifest_of(data))
    assert blobs_of(same(store), "m") == [data]


@pytest.mark.usefixtures("parts")
def test_a_large_blob_of_other_bytes_never_appears() -> None:
    store, data = memory_store(), data_of(5_000_000)
    with store.session() as session, pytest.raises(DigestMismatchError):
        session.add(descriptor_of(data), BytesReader(bytes(len(data))))
    assert keys_of(store.bucket) == set()


@pytest.mark.parametrize("size", [1, 3000])
@pytest.mark.usefixtures("parts")
def test_an_object_of_another_size_is_replaced(size: int) -> None:
    store, data = memory_store(), data_of(size)
    store.bucket.put(blob_key(Digest.of(data)), data + b"more")
    with pytest.raises(CorruptDataError):
        store.blobs.open(descriptor_of(data))
    commit(store, "m", data)
    assert blobs_of(store, "m") == [data]


def test_a_blob_that_is_there_is_not_written_again() -> None:
    bucket = HookedBucket()
    commit(BucketStore(bucket), "m", b"one")
    version = bucket.head(blob_key(Digest.of(b"one"))).version
    assert commit(BucketStore(bucket), "n", b"one") == set()
    assert bucket.head(blob_key(Digest.of(b"one"))).version == version


def test_a_blob_that_is_removed_before_the_model_is_published() -> None:
    store = memory_store()
    with store.session() as session:
        assert session.missing([descriptor_of(b"one")]) != []
        commit(same(store), "n", b"one")
        assert session.missing([descriptor_of(b"one")]) == []
        store.bucket.delete([blob_key(Digest.of(b"one"))])
        with pytest.raises(Exception, match="is missing"):
            session.publish(M, manifest_of(b"one"))
    assert store.manifests.names() == [N]


# What other machines find


def test_notes_are_found_by_other_machines() -> None:
    store, key = memory_store(), "a" * 64
    with store.session() as session:
        blob = session.put(b"one")
        session.note(key, blob)
        session.keep()
        with same(store).session() as other:
            for verify_it in (False, True):
                found = other.recall(key, 3, verify=verify_it)
                assert found is not None
                assert (found.digest, found.size) == (blob.digest, 3)
            by_digest = other.recall(blob.digest.hex, 3, verify=True)
            assert by_digest is not None
            assert by_digest.digest == blob.digest
            assert other.recall(key, 4, verify=False) is None
            assert other.recall("b" * 64, 3, verify=False) is None
            other.publish(M, manifest_of(b"one"))
    assert blobs_of(store, "m") == [b"one"]


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"{",
        b"[]",
        b'{"digest": "sha256:x", "size": 3}',
        b'{"size": 3}',
        b'{"digest": 7, "size": 3}',
        b'{"size": 3, "digest": "' + b"x" * 9000 + b'"}',
    ],
)
def test_a_note_that_is_not_one_is_ignored(note: bytes) -> None:
    store, key = memory_store(), "a" * 64
    store.bucket.put(MADE + key, note)
    with store.session() as session:
        assert session.recall(key, 3, verify=False) is None


def test_a_note_about_wrong_bytes_is_refused_where_they_are_checked() -> None:
    store, key = memory_store(), "a" * 64
    digest = Digest.of(b"one")
    store.bucket.put(blob_key(digest), b"two")
    with store.session() as session:
        session.note(key, Descriptor(media_type="", digest=digest, size=3))
        session.keep()
        assert session.recall(key, 3, verify=True) is None


def test_many_notes_are_written_together() -> None:
    store = memory_store()
    with store.session() as session:
        for number in range(100):
            session.note(f"{number:064x}", session.put(b"%d" % number))
    assert len(keys_of(store.bucket, MADE)) == 100


def test_two_writers_of_one_blob() -> None:
    store, data = memory_store(), data_of(100_000)
    meet = threading.Barrier(4)

    def write(number: int) -> None:
        with same(store).session() as session:
            meet.wait()
            session.put(data)
            session.publish(N if number % 2 else M, manifest_of(data))

    workers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert blobs_of(store, "m") == blobs_of(store, "n") == [data]


def test_blobs_of_one_plan_by_several_machines() -> None:
    store = memory_store()
    plan = plan_import(PYCODE, quant="int4")
    names = [blob.name for blob in plan.blobs]
    for name in names[::2]:
        make_blob(plan, name, same(store))
    assert store.manifests.names() == []
    result = run_plan(plan, "m", same(store))
    assert result.recalled == len(names[::2])
    assert verify(store).is_sound
