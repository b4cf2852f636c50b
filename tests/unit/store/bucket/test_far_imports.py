"""Imports from servers into a bucket that are cut off: the next one, on any machine, goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.buckets import memory_store
from support.checkpoints import normal, write_checkpoint
from support.streaming import TINY, streamed

import blobstore
from blobstore.errors import DigestMismatchError, RemoteError
from blobstore.names import ModelName
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.bucket.objects import blob_key, digest_in
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home

BLOB = 384 * 512 * 2
"""Bytes of the source of each blob but one."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {"model.a.norm.weight": normal("n", 512)}
    tensors |= {f"model.{name}.weight": normal(name, 384, 512) for name in "abc"}
    return write_checkpoint(tmp_path / "m", tensors)


@pytest.fixture
def store() -> BucketStore:
    return memory_store()


@pytest.fixture
def want(source: Path) -> str:
    return digest(source, MemoryStore())


def digest(source: Path, store: Home) -> str:
    return str(blobstore.import_model(source, "m", store=store, quant="int4", jobs=2).digest)


def cut(source: Path, store: BucketStore, number: int, error: BaseException, **how: bool) -> int:
    """Import until so many ranges were fetched; return their bytes."""
    with streamed(TINY, **how) as fetched:

        def fail(_name: str, _begin: int) -> None:
            if len(fetched.ranges) >= number:
                raise error

        fetched.before = fail
        with pytest.raises(type(error)):
            digest(source, store)
    return fetched.nbytes


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("error", [RemoteError("cut"), KeyboardInterrupt()], ids=["cut", "Ctrl-C"])
@pytest.mark.parametrize("number", [1, 120])
def test_finished_blobs_are_not_fetched_again(
    source: Path, store: BucketStore, number: int, error: BaseException, declared: bool, want: str
) -> None:
    before = cut(source, store, number, error, declared=declared)
    with streamed(TINY, declared=declared) as fetched:
        assert digest(source, store) == want
    size = (source / "model.safetensors").stat().st_size
    assert before + fetched.nbytes <= size + BLOB + 5 * TINY


def test_what_the_bucket_lost_is_made_again(source: Path, store: BucketStore, want: str) -> None:
    cut(source, store, 100, RemoteError("cut"), declared=True)
    there = [state.key for state in store.bucket.objects("blobs/") if digest_in(state.key)]
    assert len(there) > 1
    store.bucket.delete(there)
    with streamed(TINY, declared=True):
        assert digest(source, store) == want
    for blob in store.manifests.read(ModelName.parse("m")).descriptors:
        assert store.bucket.head(blob_key(blob.digest)).size == blob.size


def test_wrong_bytes_make_no_model(source: Path, store: BucketStore, want: str) -> None:
    with streamed(TINY, declared=True) as fetched:

        def damage(_name: str, begin: int, data: memoryview) -> None:
            if begin == 0:
                data[-1] ^= 1

        fetched.change = damage
        with pytest.raises(DigestMismatchError):
            digest(source, store)
    assert list(store.manifests.names()) == []
    with streamed(TINY, declared=True):
        assert digest(source, store) == want
