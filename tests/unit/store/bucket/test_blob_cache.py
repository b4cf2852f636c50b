"""The cache of a bucket's blobs: bounded, checked, shared with others."""

import mmap
import os
from pathlib import Path

import pytest
from support.buckets import memory_store

from blobstore.errors import LimitExceededError, StorageError, UsageError
from blobstore.names import Digest
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.bucket.objects import BlobCache, blob_key
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store
from blobstore.testing.blobs import commit, data_of, descriptor_of

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


@pytest.mark.parametrize("damage", ["changed", "pipe"])
def test_a_damaged_blob_is_fetched_again(store: BucketStore, tmp_path: Path, damage: str) -> None:
    near = cached(store, tmp_path)
    read(near, ONE)
    path = tmp_path / "blobs" / Digest.of(ONE).file_name
    path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(TWO)
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
