"""Buffers: there are so many and no more, placed as they have to be.

After an import all are free.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import normal, write_checkpoint
from support.chunks import LEAST, chunks_of

import blobstore
from blobstore.importer import writing as write
from blobstore.importer.segments import Buffer, BufferPool
from blobstore.io.durable import PAGE
from blobstore.store.local.store import Store


def taken_from(pool: BufferPool) -> Buffer:
    buffer = pool.take(60)
    assert buffer is not None
    return buffer


@pytest.mark.parametrize("offset", [0, 1, 8, PAGE - 1, PAGE, 3 * PAGE + 17, 2**40 + 5])
def test_a_buffer_lies_in_memory_as_its_bytes_lie_in_the_file(offset: int) -> None:
    view = taken_from(BufferPool(1, LEAST)).at(offset, LEAST)
    assert len(view) == LEAST
    assert np.frombuffer(view, np.uint8).ctypes.data % PAGE == offset % PAGE
    assert not view.readonly


def test_a_buffer_is_free_when_each_user_has_released_it() -> None:
    pool = BufferPool(1, LEAST)
    first = taken_from(pool)
    first.use()
    first.release()
    assert pool.take(0) is None
    first.release()
    assert taken_from(pool) is first


def test_who_wants_one_more_waits() -> None:
    pool = BufferPool(1, LEAST)
    buffer = taken_from(pool)
    taken: list[Buffer] = []
    thread = threading.Thread(target=lambda: taken.append(taken_from(pool)))
    thread.start()
    thread.join(0.05)
    assert taken == []
    buffer.release()
    thread.join(60)
    assert [one.memory for one in taken] == [buffer.memory]


class Watched(BufferPool):
    """A pool that knows how many buffers it had."""

    def __init__(self, count: int, nbytes: int) -> None:
        super().__init__(count, nbytes)
        self.count, self.nbytes = count, nbytes
        pools.append(self)


pools: list[Watched] = []


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imports with small chunks take their buffers from `Watched`."""
    pools.clear()
    monkeypatch.setattr(write, "BufferPool", Watched)
    with chunks_of(LEAST):
        yield


@pytest.mark.parametrize("jobs", [1, 2, 8])
def test_all_buffers_come_back(tmp_path: Path, store: Store, jobs: int) -> None:
    tensors = {
        f"{number}.weight": normal(str(number), 64, 64, dtype=np.float32) for number in range(10)
    }
    source = write_checkpoint(tmp_path / "m", tensors)
    memory = write.least_memory(jobs)
    blobstore.import_model(source, store=store, quant="int8", jobs=jobs, memory=memory)
    (pool,) = pools
    assert pool.count >= jobs
    assert pool.count * LEAST <= memory
    assert pool.free.qsize() == pool.count  # none is lost


def test_buffers_are_no_larger_than_all_blobs_together(tmp_path: Path, store: Store) -> None:
    source = write_checkpoint(tmp_path / "m", {"a": normal("a", 64), "large": normal("l", 512, 64)})
    blobstore.import_model(source, store=store)
    assert pools[-1].nbytes == LEAST
    small = write_checkpoint(tmp_path / "n", {"a": normal("a", 64), "other": normal("b", 41)})
    plan = blobstore.plan_import(small)
    with chunks_of(2**20):
        blobstore.import_model(small, store=store)
    assert pools[-1].nbytes < sum(blob.size + 2 * PAGE for blob in plan.blobs)
