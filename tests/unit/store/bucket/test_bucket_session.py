"""Sessions of a bucket: conditional writes, races for a tag, what other machines find."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.bucket_work import check_whole, come_and_go, prune
from support.buckets import HookedBucket, keys_of, memory_store, same
from support.checkpoints import normal, write_checkpoint
from support.streaming import TINY, streamed

import blobstore
from blobstore import errors
from blobstore.io.objects import ObjectVersion
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
    digest_in,
    manifest_key,
)
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home
from blobstore.testing.blobs import M, blobs_of, commit, data_of, descriptor_of, manifest_of

KEY = "a" * 64


def test_a_copy_of_the_prefix_is_a_store(tmp_path: Path) -> None:
    store = memory_store()
    for name in ("m", "host.example:5000/ns/m:tag"):
        commit(store, name, b"one", data_of(70_000), with_config=False)
    for key in keys_of(store.bucket):
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.bucket.get(key)[0])
    copy = Store(tmp_path)
    assert copy.manifests.names() == store.manifests.names()
    assert blobs_of(copy, "m") == [b"one", data_of(70_000)]
    assert verify(copy).is_sound


@pytest.mark.parametrize("checked", [(), ("if_absent",)])
def test_a_service_without_conditions_is_refused(checked: tuple[str, ...]) -> None:
    """It ignores the conditions of writes, or all but one, as old servers do."""

    class CarelessBucket(HookedBucket):
        def put(self, key: str, data: bytes | memoryview, **conditions: Any) -> ObjectVersion:
            return super().put(key, data, **{one: conditions.get(one) for one in checked})

    bucket = CarelessBucket()
    with pytest.raises(errors.StorageError, match="conditional writes"):
        commit(BucketStore(bucket), "m", b"one")
    assert keys_of(bucket) == set()


# A tag


def at_first(key: str, work: Callable[[], object], times: int = 1) -> Callable[[str], None]:
    """Return a hook that does something at the first writes of an object."""
    waiting = [key] * times

    def hook(written: str) -> None:
        if written in waiting:
            waiting.remove(written)
            work()

    return hook


def test_a_lost_race_says_which_model_won() -> None:
    bucket = HookedBucket()
    slow, fast = BucketStore(bucket), BucketStore(bucket)
    bucket.before = at_first(manifest_key(M), lambda: commit(fast, "m", b"fast", b"er"))
    with pytest.raises(errors.ConflictError) as caught:
        commit(slow, "m", b"slow")
    assert str(manifest_of(b"fast", b"er").digest) in caught.value.message
    assert caught.value.model == "m:latest"
    assert blobs_of(fast, "m") == [b"fast", b"er"]


@pytest.mark.parametrize("folder", [PROBES, MANIFESTS])
def test_no_lost_answer_is_another_writer(folder: str) -> None:
    """A service that writes and then answers 500: the retry finds what the first request wrote."""
    bucket = HookedBucket()
    written: set[str] = set()

    def lose(key: str) -> None:
        if key.startswith(folder) and key not in written:
            written.add(key)
            raise errors.ConflictError("it is there")

    bucket.after = lose
    store = BucketStore(bucket)
    commit(store, "m", b"one", expected=(None,))
    written.clear()
    commit(store, "m", b"two")
    assert blobs_of(store, "m") == [b"two"]


def test_a_write_that_is_refused_for_a_while_is_sent_again() -> None:
    """S3 answers 409 while another request for the object goes on."""
    bucket = HookedBucket()
    refused = Mock(side_effect=errors.ConflictError("a conflicting operation is in progress"))
    bucket.before = at_first(manifest_key(M), refused, times=3)
    commit(BucketStore(bucket), "m", b"one")
    assert refused.call_count == 3


def test_a_manifest_that_can_not_be_written_changes_nothing() -> None:
    bucket = HookedBucket()
    store = BucketStore(bucket)
    commit(store, "m", b"one")
    bucket.before = at_first(manifest_key(M), Mock(side_effect=errors.RemoteError("no answer")))
    with pytest.raises(errors.RemoteError):
        commit(store, "m", b"two")
    assert blobs_of(store, "m") == [b"one"]
    assert keys_of(bucket, LEASES) == set()


# Blobs


def test_a_large_blob_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "SMALL", 1000)
    store, data = memory_store(), data_of(3_000_000)
    with store.session() as session:
        with pytest.raises(errors.DigestMismatchError):
            session.add(descriptor_of(data), BytesReader(bytes(len(data))))
        assert keys_of(store.bucket, "blobs/") == set()
        session.add(descriptor_of(data), BytesReader(data))
        session.publish(M, manifest_of(data))
    assert blobs_of(same(store), "m") == [data]


@pytest.mark.parametrize("size", [1, 3000])
def test_an_object_of_another_size_is_replaced(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "SMALL", 1000)
    store, data = memory_store(), data_of(size)
    store.bucket.put(blob_key(Digest.of(data)), data + b"more")
    with pytest.raises(errors.CorruptDataError):
        store.blobs.open(descriptor_of(data))
    commit(store, "m", data)
    assert blobs_of(store, "m") == [data]


# Notes: what other machines find


def test_notes_are_found_by_other_machines() -> None:
    store = memory_store()
    with store.session() as session:
        blob = session.put(b"one")
        session.note(KEY, blob)
        for number in range(70):  # they are written together
            session.note(f"{number:064x}", blob)
        session.keep()
        assert len(keys_of(store.bucket, MADE)) == 71
        with same(store).session() as other:
            for key, is_checked in ((KEY, False), (KEY, True), (blob.digest.hex, True)):
                found = other.recall(key, 3, verify=is_checked)
                assert found is not None
                assert (found.digest, found.size) == (blob.digest, 3)
            assert other.recall(KEY, 4, verify=False) is None
            assert other.recall("b" * 64, 3, verify=False) is None
            other.publish(M, manifest_of(b"one"))
    assert blobs_of(store, "m") == [b"one"]


def test_notes_that_are_not_ones_or_are_about_wrong_bytes_are_ignored() -> None:
    store = memory_store()
    store.bucket.put(blob_key(Digest.of(b"one")), b"two")
    with store.session() as session:
        for note in (b'{"digest": "sha256:x", "size": 3}', b'{"digest": "' + b"x" * 9000 + b'"}'):
            store.bucket.put(MADE + KEY, note)
            assert session.recall(KEY, 3, verify=False) is None
        session.note(KEY, descriptor_of(b"one"))
        session.keep()
        assert session.recall(KEY, 3, verify=True) is None


LONG = pytest.param(700, marks=[pytest.mark.long, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("count", [6, LONG])
def test_prune_beside_imports(count: int) -> None:
    """Three writers of models that share blobs, and a clean-up of blobs of any age beside them."""
    store = memory_store()
    pruned, counts = Counter[str](), Counter[str]()
    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(come_and_go, same(store), seed, count) for seed in range(3)]
        for _ in range(count // 2):
            pruned += prune(same(store)).counts
            check_whole(store)
        for writer in writers:
            counts += writer.result().counts
    pruned += prune(store).counts
    check_whole(store)
    assert pruned["pruned"] > 0
    assert counts["make"] > 0
    assert not counts["make: NotFoundError"]


def test_finished_blobs_are_not_fetched_again_and_lost_ones_are_made_again(tmp_path: Path) -> None:
    tensors = {f"model.{name}.weight": normal(name, 384, 512) for name in "abc"}
    source = write_checkpoint(tmp_path / "m", tensors)
    nbytes = 384 * 512 * 2  # of the source of each blob

    def digest(store: Home) -> str:
        return str(blobstore.import_model(source, "m", store=store, quant="int4", jobs=2).digest)

    store, wanted = memory_store(), digest(MemoryStore())
    with streamed(TINY) as first:

        def fail(_name: str, _begin: int) -> None:
            if len(first.ranges) >= 120:
                raise errors.RemoteError("cut")

        first.before = fail
        with pytest.raises(errors.RemoteError):
            digest(store)
    there = [state.key for state in store.bucket.objects("blobs/") if digest_in(state.key)]
    store.bucket.delete(there[:1])
    with streamed(TINY) as second:
        assert digest(store) == wanted
    size = (source / "model.safetensors").stat().st_size
    assert first.nbytes + second.nbytes <= size + 2 * nbytes + 5 * TINY
    assert verify(store).is_sound
