"""Imports from servers into a bucket that are cut off: the next one, on any machine, goes on."""

from pathlib import Path

import pytest
from support.buckets import memory_store
from support.checkpoints import normal, write_checkpoint
from support.streaming import TINY, streamed

import blobstore
from blobstore.errors import RemoteError
from blobstore.store.bucket.objects import digest_in
from blobstore.store.care.verify import verify
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home

BLOB = 384 * 512 * 2
"""Bytes of the source of each blob but one."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {"model.a.norm.weight": normal("n", 512)}
    tensors |= {f"model.{name}.weight": normal(name, 384, 512) for name in "abc"}
    return write_checkpoint(tmp_path / "m", tensors)


def digest(source: Path, store: Home) -> str:
    return str(blobstore.import_model(source, "m", store=store, quant="int4", jobs=2).digest)


def test_finished_blobs_are_not_fetched_again_and_lost_ones_are_made_again(source: Path) -> None:
    store, wanted = memory_store(), digest(source, MemoryStore())
    with streamed(TINY) as first:

        def fail(_name: str, _begin: int) -> None:
            if len(first.ranges) >= 120:
                raise RemoteError("cut")

        first.before = fail
        with pytest.raises(RemoteError):
            digest(source, store)
    there = [state.key for state in store.bucket.objects("blobs/") if digest_in(state.key)]
    store.bucket.delete(there[:1])
    with streamed(TINY) as second:
        assert digest(source, store) == wanted
    size = (source / "model.safetensors").stat().st_size
    assert first.nbytes + second.nbytes <= size + 2 * BLOB + 5 * TINY
    assert verify(store).is_sound
