"""Buffers: there are so many and no more, placed as they have to be.

After an import, failed or not, all are free.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import normal, write_checkpoint
from support.chunks import LEAST, chunks_of
from support.many import sharded_checkpoint

import blobstore
from blobstore.errors import CorruptDataError, NonFiniteWeightError
from blobstore.importer import writing as write
from blobstore.importer.buffers import Buffer, BufferPool, SpareMemory
from blobstore.importer.work.tasks import DividedPlan, Task
from blobstore.importer.work.worker import MadeTask, TaskMaker
from blobstore.io.durable import PAGE
from blobstore.io.workers import silent
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore


@pytest.mark.parametrize("offset", [0, 1, 8, PAGE - 1, PAGE, 3 * PAGE + 17, 2**40 + 5])
def test_a_buffer_lies_in_memory_as_its_bytes_lie_in_the_file(offset: int) -> None:
    view = BufferPool(1, LEAST).take().at(offset, LEAST)
    assert len(view) == LEAST
    assert np.frombuffer(view, np.uint8).ctypes.data % PAGE == offset % PAGE
    assert not view.readonly


def test_a_buffer_is_given_back_once() -> None:
    pool = BufferPool(2, LEAST)
    first, second = pool.take(), pool.take()
    first.release()
    again = pool.take()
    first.release()
    assert again.memory is first.memory
    assert pool.is_empty
    second.release()
    assert pool.take().memory is second.memory


def test_jobs_that_follow_each_other_share_buffers() -> None:
    spare = SpareMemory()
    first = BufferPool(3, LEAST, spare, 100)
    left, given_back = first.take(), first.take()
    given_back.release()
    second = BufferPool(2, LEAST, spare, 100)
    taken = [second.take(), second.take()]
    assert taken[0].memory is given_back.memory
    assert second.is_empty
    first.close()  # with a buffer that was not given back, as after an error
    assert second.take().memory is left.memory
    left.release()
    assert second.is_empty
    for other in (BufferPool(3, 2 * LEAST, spare, 100), BufferPool(3, LEAST, spare, 200)):
        memory = {id(other.take().memory) for _ in range(3)}
        assert other.is_empty
        assert not memory & {id(buffer.memory) for buffer in (left, *taken)}


def test_who_wants_one_more_waits() -> None:
    pool = BufferPool(1, LEAST)
    buffer = pool.take()
    taken: list[Buffer] = []
    thread = threading.Thread(target=lambda: taken.append(pool.take()))
    thread.start()
    thread.join(0.05)
    assert taken == []
    buffer.release()
    thread.join(60)
    assert [one.memory for one in taken] == [buffer.memory]


class Watched(BufferPool):
    """A pool that says how many of its buffers are out, and were at most."""

    def __init__(
        self, count: int, nbytes: int, spare: SpareMemory | None = None, memory: int = 0
    ) -> None:
        super().__init__(count, nbytes, spare, memory)
        self.count, self.nbytes = count, nbytes
        self.out = self.free = -1
        pools.append(self)

    def close(self) -> None:
        """Note how many are taken, and how many are free, at the end."""
        self.out, self.free = len(self._taken), self._free.qsize()
        super().close()


pools: list[Watched] = []


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imports with small chunks take their buffers from `Watched`."""
    pools.clear()
    monkeypatch.setattr(write, "BufferPool", Watched)
    with chunks_of(LEAST):
        yield


@pytest.mark.parametrize("jobs", [1, 2, 8])
@pytest.mark.parametrize("bad", [None, (0, 0), (5, 0), (5, 63), (9, 63)])
def test_all_buffers_come_back(
    tmp_path: Path, store: Store, jobs: int, bad: tuple[int, int] | None
) -> None:
    tensors = {
        f"{number}.weight": normal(str(number), 64, 64, dtype=np.float32) for number in range(10)
    }
    if bad is not None:
        tensors[f"{bad[0]}.weight"][bad[1], 5] = np.nan
    source = write_checkpoint(tmp_path / "m", tensors)
    memory = write.least_memory(jobs)
    if bad is None:
        blobstore.import_model(source, store=store, quant="int8", jobs=jobs, memory=memory)
    else:
        with pytest.raises(NonFiniteWeightError):
            blobstore.import_model(source, store=store, quant="int8", jobs=jobs, memory=memory)
    (pool,) = pools
    assert pool.out == 0
    assert pool.count >= jobs
    assert pool.count * LEAST <= memory
    assert pool.free == pool.count  # none is lost


def test_buffers_are_no_larger_than_all_blobs_together(tmp_path: Path, store: Store) -> None:
    source = write_checkpoint(tmp_path / "m", {"a": normal("a", 64), "large": normal("l", 512, 64)})
    blobstore.import_model(source, store=store)
    assert pools[-1].nbytes == LEAST
    small = write_checkpoint(tmp_path / "n", {"a": normal("a", 64), "other": normal("b", 41)})
    plan = blobstore.plan_import(small)
    with chunks_of(2**20):
        blobstore.import_model(small, store=store)
    assert pools[-1].nbytes < sum(blob.size + 2 * PAGE for blob in plan.blobs)


def test_tasks_in_turn_share_their_memory(tmp_path: Path, store: Store) -> None:
    """As on a Dask worker: a task begins while the one before it ends, in the same buffers."""
    source = sharded_checkpoint(tmp_path / "m", 6)
    divided = DividedPlan(blobstore.plan_import(source, quant="int4"))
    spare, turn = SpareMemory(), threading.Lock()
    memory = write.least_memory(2)

    def make(task: Task) -> list[MadeTask]:
        maker = TaskMaker(divided, store, 2, memory, verify=False, spare=spare, turn=turn)
        return maker.make([task], {task.number: ()})

    with ThreadPoolExecutor(4) as threads:
        made = [one for found in threads.map(make, divided.tasks) for one in found]
    assert not turn.locked()
    assert {pool.count * LEAST <= memory for pool in pools} == {True}
    found = {blob.name: blob.digest for one in made for blob in one.blobs}
    alone = blobstore.import_model(source, store=MemoryStore(), quant="int4").manifest
    assert found == {layer.name: layer.digest for layer in alone.layers if layer.name in found}
    assert len(found) == len(divided.plan.blobs)


def test_the_turn_ends_when_the_last_work_is_taken_and_with_an_error(
    tmp_path: Path, store: Store
) -> None:
    tensors = {f"{number}.weight": normal(str(number), 64, 64) for number in range(4)}
    source = write_checkpoint(tmp_path / "m", tensors)
    plan, finished = blobstore.plan_import(source), []
    with store.session() as session:

        def taken() -> None:
            finished.append(len(list(store.root.glob(".blobstore/tmp/*/sha256-*"))))

        blobs = write.write_blobs(
            plan, session, 1, write.usual_memory(1), silent, verify_reuse=False, taken=taken
        ).blobs
    assert (len(finished), len(blobs)) == (1, 4)
    assert finished[0] < 4
    for path in source.glob("*.safetensors"):
        path.write_bytes(path.read_bytes() + b"0")
    turn = threading.Lock()
    maker = TaskMaker(DividedPlan(plan), store, 1, write.least_memory(1), verify=False, turn=turn)
    with pytest.raises(CorruptDataError):
        maker.make(DividedPlan(plan).tasks, {0: (), 1: ()})
    assert not turn.locked()
