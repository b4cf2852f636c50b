"""Buckets with objects that other programs put there, or that are damaged: errors with a type."""

from pathlib import Path

import pytest
from support.buckets import memory_store

from blobstore import errors
from blobstore.inspection.listing import BrokenModel, list_models
from blobstore.names import Digest, ModelName
from blobstore.store.bucket import objects
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


def test_two_spellings_of_a_name() -> None:
    store = memory_store()
    commit(store, "qwen:Q4", b"one")
    other = ModelName.parse("Qwen:q4")
    store.bucket.put(manifest_key(other), manifest_of(b"one").raw)
    with pytest.raises(errors.AmbiguousNameError):
        store.find("QWEN:q4")
    assert store.find("Qwen:q4") == other


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
