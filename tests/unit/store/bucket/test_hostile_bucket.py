"""Buckets with objects that other programs put there, or that are damaged: errors with a type."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.buckets import memory_store

from blobstore.errors import (
    AmbiguousNameError,
    BlobStoreError,
    CorruptDataError,
    DigestMismatchError,
    DocumentError,
    LimitExceededError,
    NotFoundError,
    ShortReadError,
)
from blobstore.inspection.listing import BrokenModel, list_models
from blobstore.names import Digest, ModelName
from blobstore.store.bucket import objects
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.bucket.leases import LONGEST_LEASE_S, read_sweep, sessions_in
from blobstore.store.bucket.objects import (
    LEASES,
    SIGNATURES,
    SWEEP,
    BlobCache,
    blob_key,
    manifest_key,
)
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.memory import MemoryStore
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import M, N, commit, data_of, descriptor_of, manifest_of

STRAYS = (
    "README",
    "blobs/sha256-abc",
    "blobs/folder/sha256-" + "0" * 64,
    "blobs/sha256:" + "0" * 64,
    "blobs/SHA256-" + "0" * 64,
    "manifests/stray",
    "manifests/a/b/c/d/e",
    "manifests/host/ns/m/a b%20\u00e4",
    "manifests/-host/ns/m/tag",
    ".blobstore/unknown",
    ".blobstore/leases/nothing/here",
)


@pytest.fixture
def store() -> BucketStore:
    """A store with a model and many other objects."""
    store = memory_store()
    commit(store, "m", b"one", data_of(70_000), with_config=False)
    for key in (*STRAYS, *(f"blobs/{number:04}" for number in range(1000))):
        store.bucket.put(key, b"?")
    return store


def test_other_objects_are_not_models_or_blobs(store: BucketStore) -> None:
    assert store.manifests.names() == [M]
    assert store.find("m") == M
    assert len(store.blobs.digests()) == 2
    usage = measure_usage(store)
    assert (usage.blobs, usage.nbytes, usage.reclaimable) == (2, 70_003, 0)
    found = verify(store)
    assert [str(odd.path) for odd in found.odd if "manifests" in str(odd.path)] == [
        key for key in sorted(STRAYS) if key.startswith("manifests/")
    ]
    assert len(found.odd) == 1000 + 4 + 4


def test_two_spellings_of_a_name() -> None:
    store = memory_store()
    commit(store, "qwen:Q4", b"one")
    other = ModelName.parse("Qwen:q4")
    store.bucket.put(manifest_key(other), manifest_of(b"one").raw)
    with pytest.raises(AmbiguousNameError):
        store.find("QWEN:q4")
    assert store.find("Qwen:q4") == other


@pytest.mark.parametrize("raw", [b"", b'{"schemaVersion": 2, "layers": [1]}'])
def test_a_manifest_that_is_not_one(raw: bytes) -> None:
    store = memory_store()
    commit(store, "n", b"one")
    store.bucket.put(manifest_key(M), raw)
    with pytest.raises(DocumentError) as caught:
        store.manifests.read(M)
    assert caught.value.model == "m:latest"
    kinds = [type(found) for found in list_models(store)]
    assert kinds == [BrokenModel, BrokenModel]  # the other is not a model of tensors
    assert verify(store).broken[0].name == M
    assert measure_usage(store).models[0].error is not None
    store.remove("m")
    assert store.manifests.names() == [N]


def test_a_manifest_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_MANIFEST", 1000)
    store = memory_store()
    store.bucket.put(manifest_key(M), b" " * 1001)
    with pytest.raises(LimitExceededError):
        store.manifests.read(M)
    assert verify(store).broken[0].name == M
    store.remove("m")


def test_blobs_with_other_bytes_or_sizes(tmp_path: Path) -> None:
    store = memory_store()
    one, two, three = data_of(70_000), data_of(50_000), data_of(10)
    commit(store, "m", one, two, three, with_config=False)
    store.bucket.put(blob_key(Digest.of(one)), bytes(len(one)))
    store.bucket.put(blob_key(Digest.of(two)), two[:-1])
    store.bucket.delete([blob_key(Digest.of(three))])
    found = verify(store)
    reasons = {blob.digest: blob.reason for blob in found.damaged}
    assert reasons == {
        Digest.of(one): "its bytes do not match its digest",
        Digest.of(two): "its bytes do not match its digest",
        Digest.of(three): "it is missing",
    }
    quick = {blob.digest: blob.reason for blob in verify(store, quick=True).damaged}
    assert set(quick) == set(reasons)
    with pytest.raises(DigestMismatchError):
        store.blobs.read(descriptor_of(one))
    with pytest.raises(CorruptDataError):
        store.blobs.open(descriptor_of(two))
    with pytest.raises(NotFoundError):
        store.blobs.open(descriptor_of(three))
    for data in (one, two, three):
        cache = BlobCache(tmp_path / "cache")
        with pytest.raises(BlobStoreError):
            cache.bring([descriptor_of(data)], store.blobs.open)
        assert cache.find(descriptor_of(data)) is None
        with pytest.raises(BlobStoreError):
            transfer("m", store, MemoryStore())


def test_a_blob_that_shrinks_after_it_was_opened() -> None:
    store = memory_store()
    data = data_of(70_000)
    commit(store, "m", data)
    with store.blobs.open(descriptor_of(data)) as reader:
        store.bucket.put(blob_key(Digest.of(data)), data[:1000])
        with pytest.raises(ShortReadError):
            reader.digest()


def test_signatures_that_are_not_ones() -> None:
    store = memory_store()
    folder = f"{SIGNATURES}{manifest_of(b'one').digest.hex}"
    store.bucket.put(f"{folder}/odd", b"?")
    assert store.signatures.read(M, manifest_of(b"one").digest) == []
    store.bucket.put(f"{folder}/{'0' * 64}", b"?")
    with pytest.raises(CorruptDataError, match="is damaged"):
        store.signatures.read(M, manifest_of(b"one").digest)
    raw = b"{}"
    store.bucket.delete([f"{folder}/{'0' * 64}"])
    store.bucket.put(f"{folder}/{Digest.of(raw).hex}", raw)
    with pytest.raises(DocumentError):
        store.signatures.read(M, manifest_of(b"one").digest)


@pytest.mark.parametrize("seconds", ["1" + "0" * 400, "-5", '"x"'])
def test_leases_of_any_length_count_an_hour_at_most(seconds: str) -> None:
    store = memory_store()
    said = f'{{"holder": "h", "phase": "deleting", "blobs": [], "lease_s": {seconds}}}'
    store.bucket.put(f"{LEASES}one", said.encode())
    store.bucket.put(SWEEP, said.encode())
    (session,) = sessions_in(store.bucket)
    sweep = read_sweep(store.bucket)[1]
    assert sweep is not None
    wanted = 0 if seconds == "-5" else LONGEST_LEASE_S
    assert (session.lease_s, sweep.lease_s) == (wanted, wanted)
    assert not sweep.is_live(datetime.now(UTC) + timedelta(hours=2))
