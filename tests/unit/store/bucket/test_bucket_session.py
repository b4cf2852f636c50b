"""Buckets: conditional writes, races for a tag, what other machines find, damaged objects."""

import mmap
import os
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
from blobstore.errors import LimitExceededError, StorageError, UsageError
from blobstore.inspection.listing import BrokenModel, list_models
from blobstore.io.objects import ObjectVersion
from blobstore.io.ranges import BytesReader
from blobstore.names import Digest
from blobstore.store.bucket import objects
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.bucket.leases import LONGEST_LEASE_S, read_sweep, sessions_in
from blobstore.store.bucket.objects import (
    LEASES,
    MADE,
    MANIFESTS,
    PROBES,
    SIGNATURES,
    SWEEP,
    BlobCache,
    blob_key,
    digest_in,
    manifest_key,
)
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import M, N, blobs_of, commit, data_of, descriptor_of, manifest_of

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


@pytest.mark.parametrize("checked", [set(), {"if_absent"}])
def test_a_service_without_conditions_is_refused(checked: set[str]) -> None:
    """It ignores the conditions of writes, or all but one, as old servers do."""

    class CarelessBucket(HookedBucket):
        def put(self, key: str, data: bytes | memoryview, **conditions: Any) -> ObjectVersion:
            kept = {one: conditions[one] for one in checked & conditions.keys()}
            return super().put(key, data, **kept)

    bucket = CarelessBucket()
    with pytest.raises(errors.StorageError, match="conditional writes"):
        commit(BucketStore(bucket), "m", b"one")
    assert keys_of(bucket) == set()


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


# Objects that other programs put there, or that are damaged: errors with a type


STRAY_BLOBS = [f"blobs/{place}{'0' * 64}" for place in ("", "folder/sha256-", "sha256:", "SHA256-")]
STRAY_MANIFESTS = (
    "manifests/-host/ns/m/tag",
    "manifests/a/b/c/d/e",
    "manifests/host/ns/m/a b%20\u00e4",
    "manifests/stray",
)


def test_other_objects_are_not_models_or_blobs() -> None:
    store = memory_store()
    commit(store, "m", b"one", data_of(70_000), with_config=False)
    for key in (*STRAY_BLOBS, *STRAY_MANIFESTS, "README", ".blobstore/leases/nothing/here"):
        store.bucket.put(key, b"?")
    assert store.manifests.names() == [M]
    assert store.find("m") == M
    assert len(store.blobs.digests()) == 2
    usage = measure_usage(store)
    assert (usage.blobs, usage.nbytes, usage.reclaimable) == (2, 70_003, 0)
    odd = [str(one.path) for one in verify(store).odd]
    assert [path for path in odd if path.startswith("manifests/")] == list(STRAY_MANIFESTS)
    assert len(odd) >= len(STRAY_MANIFESTS) + len(STRAY_BLOBS) - 1


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", errors.DocumentError),
        (b'{"schemaVersion": 2, "layers": [1]}', errors.DocumentError),
        (b" " * 1001, errors.LimitExceededError),
    ],
)
def test_no_manifest(
    raw: bytes, error: type[errors.BlobStoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "MAX_MANIFEST", 1000)
    store = memory_store()
    commit(store, "n", b"one")
    store.bucket.put(manifest_key(M), raw)
    with pytest.raises(error):
        store.manifests.read(M)
    kinds = [type(found) for found in list_models(store)]
    assert kinds == [BrokenModel, BrokenModel]  # the other is not a model of tensors
    assert verify(store).broken[0].name == M
    assert measure_usage(store).models[0].error is not None
    store.remove("m")
    assert store.manifests.names() == [N]


def test_blobs_with_other_bytes_or_sizes(tmp_path: Path) -> None:
    store = memory_store()
    changed, short, missing = data_of(70_000), data_of(50_000), data_of(10)
    commit(store, "m", changed, short, missing, with_config=False)
    store.bucket.put(blob_key(Digest.of(changed)), bytes(len(changed)))
    store.bucket.put(blob_key(Digest.of(short)), short[:-1])
    store.bucket.delete([blob_key(Digest.of(missing))])
    for quick in (False, True):
        found = {blob.digest for blob in verify(store, quick=quick).damaged}
        assert found >= {Digest.of(short), Digest.of(missing)}
        assert quick or Digest.of(changed) in found
    with pytest.raises(errors.DigestMismatchError):
        store.blobs.read(descriptor_of(changed))
    with pytest.raises(errors.CorruptDataError):
        store.blobs.open(descriptor_of(short))
    with pytest.raises(errors.NotFoundError):
        store.blobs.open(descriptor_of(missing))
    for data in (changed, short, missing):
        cache = BlobCache(tmp_path / "cache")
        with pytest.raises(errors.BlobStoreError):
            cache.bring([descriptor_of(data)], store.blobs.open)
        assert cache.find(descriptor_of(data)) is None
    with pytest.raises(errors.BlobStoreError):
        transfer("m", store, MemoryStore())


def test_a_blob_that_shrinks_after_it_was_opened() -> None:
    store, data = memory_store(), data_of(70_000)
    commit(store, "m", data)
    with store.blobs.open(descriptor_of(data)) as reader:
        store.bucket.put(blob_key(Digest.of(data)), data[:1000])
        with pytest.raises(errors.ShortReadError):
            reader.digest()


@pytest.mark.parametrize(
    ("name", "error"),
    [("0" * 64, errors.CorruptDataError), (Digest.of(b"{}").hex, errors.DocumentError)],
)
def test_signatures_that_are_not_ones(name: str, error: type[errors.BlobStoreError]) -> None:
    store, digest = memory_store(), manifest_of(b"one").digest
    folder = f"{SIGNATURES}{digest.hex}"
    for odd in ("odd", f"folder/{digest.hex}"):
        store.bucket.put(f"{folder}/{odd}", b"{}")
    assert store.signatures.read(M, digest) == []
    store.bucket.put(f"{folder}/{name}", b"{}")
    with pytest.raises(error):
        store.signatures.read(M, digest)


@pytest.mark.parametrize(
    ("seconds", "counted"),
    [("1" + "0" * 400, LONGEST_LEASE_S), ("-5", 0), ('"x"', LONGEST_LEASE_S)],
)
def test_leases_of_any_length_count_an_hour_at_most(seconds: str, counted: float) -> None:
    store = memory_store()
    said = f'{{"holder": "h", "phase": "deleting", "blobs": [], "lease_s": {seconds}}}'
    store.bucket.put(f"{LEASES}one", said.encode())
    store.bucket.put(SWEEP, said.encode())
    (session,) = sessions_in(store.bucket)
    sweep = read_sweep(store.bucket)[1]
    assert sweep is not None
    assert (session.lease_s, sweep.lease_s) == (counted, counted)


# The cache of blobs: bounded, checked, shared with others


ONE, TWO, THREE = data_of(100_000, 1), data_of(100_000, 2), data_of(100_000, 3)


def cached(store: BucketStore, folder: Path, limit: int = 10**9) -> BucketStore:
    return BucketStore(store.bucket, cache=BlobCache(folder, limit))


@pytest.fixture
def store() -> BucketStore:
    """A store with three blobs of 100,000 bytes."""
    store = memory_store()
    commit(store, "m", ONE, TWO, THREE, with_config=False)
    return store


def read(store: BucketStore, data: bytes) -> None:
    store.prefetch([descriptor_of(data)])
    with store.blobs.open(descriptor_of(data)) as reader:
        assert reader.read(0, len(data)) == data


def blobs_in(folder: Path) -> set[str]:
    return {path.name.removeprefix("sha256-") for path in (folder / "blobs").iterdir()}


def test_what_is_fetched_is_kept(store: BucketStore, tmp_path: Path) -> None:
    near = cached(store, tmp_path / "cache")
    with near.blobs.open(descriptor_of(ONE)) as reader:  # it is not fetched as a whole
        assert reader.read(10, 100) == ONE[10:110]
    assert not (tmp_path / "cache" / "blobs").exists()
    read(near, ONE)
    assert blobs_in(tmp_path / "cache") == {Digest.of(ONE).hex}
    store.bucket.put(blob_key(Digest.of(ONE)), bytes(len(ONE)))
    read(near, ONE)
    assert not verify(near).is_sound  # it reads the bucket


def test_the_oldest_goes_first(store: BucketStore, tmp_path: Path) -> None:
    near = cached(store, tmp_path, 250_000)
    for data, used_at in ((ONE, 9), (TWO, 1)):
        read(near, data)
        os.utime(tmp_path / ".blobstore/used" / Digest.of(data).file_name, (used_at, used_at))
    read(near, THREE)
    assert blobs_in(tmp_path) == {Digest.of(ONE).hex, Digest.of(THREE).hex}
    used = {path.name for path in (tmp_path / ".blobstore/used").iterdir()}
    assert used == {f"sha256-{name}" for name in blobs_in(tmp_path)}


def test_a_model_larger_than_the_cache(store: BucketStore, tmp_path: Path) -> None:
    near = cached(store, tmp_path, 250_000)
    with pytest.raises(LimitExceededError, match="300,000 bytes"):
        near.prefetch([descriptor_of(data) for data in (ONE, TWO, THREE)])
    assert not (tmp_path / "blobs").exists()


def test_another_folder_is_refused(store: BucketStore, tmp_path: Path) -> None:
    commit(Store(tmp_path / "store"), "m", b"one")
    with pytest.raises(UsageError, match="not a cache"):
        cached(store, tmp_path / "store")
    cached(store, tmp_path / "cache").prefetch([descriptor_of(ONE)])
    commit(Store(tmp_path / "cache"), "m", b"one")
    with pytest.raises(UsageError, match="'blobs'"):
        cached(store, tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        cached(store, tmp_path / "file")


def test_a_damaged_blob_is_fetched_again(store: BucketStore, tmp_path: Path) -> None:
    near, path = cached(store, tmp_path), tmp_path / "blobs" / Digest.of(ONE).file_name
    read(near, ONE)
    makes: tuple[Callable[[Path], object], ...] = (lambda path: path.write_bytes(TWO), os.mkfifo)
    for make in makes:
        path.unlink()
        make(path)
        read(near, ONE)
        assert path.read_bytes() == ONE


def test_a_blob_that_others_remove_stays_readable(store: BucketStore, tmp_path: Path) -> None:
    near, other = (cached(store, tmp_path, 100_000) for _ in range(2))
    near.prefetch([descriptor_of(ONE)])
    with near.blobs.open(descriptor_of(ONE)) as reader:
        fd = reader.fileno()
        assert fd is not None
        data = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        read(other, TWO)
        assert blobs_in(tmp_path) == {Digest.of(TWO).hex}
        assert bytes(data) == ONE
        assert reader.read(0, len(ONE)) == ONE
