"""Tasks and shards: each blob is in one task, files stay whole, costs are even."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import save_file
from support.many import sharded_checkpoint

from blobstore.importer import worker as tasks
from blobstore.importer.outputs import PlannedBlob
from blobstore.importer.run import plan_import
from blobstore.importer.worker import Task, shard_of, tasks_of
from blobstore.io.ranges import FileReader, Identity
from blobstore.names import Digest
from blobstore.source.folders import LocalFolder, SourceTensor


class Costly(Task):
    """A task of so much cost."""

    @property
    def cost(self) -> int:
        return self.number


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 12))
def test_shards_are_whole_and_about_even(costs: list[int], count: int) -> None:
    whole = [Costly(cost, 0, ()) for cost in costs]
    shards = [shard_of(whole, index, count) for index in range(count)]
    assert [task for shard in shards for task in shard] == whole
    largest = max(sum(task.cost for task in shard) for shard in shards)
    assert largest <= sum(costs) / count + max(costs, default=0)


def test_each_blob_is_in_one_task_of_one_shard(tmp_path: Path) -> None:
    plan = plan_import(sharded_checkpoint(tmp_path / "m", 5), quant="int4")
    whole = tasks_of(plan)
    for count in (1, 2, 3, 5, 8, 100):
        shards = [shard_of(whole, index, count) for index in range(count)]
        parts = [task for shard in shards for task in shard]
        assert parts == list(whole)
        names = [blob.name for task in parts for blob in task.blobs]
        assert sorted(names) == sorted(blob.name for blob in plan.blobs)


def test_files_stay_whole_while_there_are_enough(tmp_path: Path) -> None:
    whole = tasks_of(plan_import(sharded_checkpoint(tmp_path / "m", 5)))
    for count in (1, 2, 3, 5):
        owners = [
            (task.file, index) for index in range(count) for task in shard_of(whole, index, count)
        ]
        assert len({file for file, _ in owners}) == len(set(owners)) == 5


@pytest.mark.parametrize("least_unit", [0, 3000])
def test_all_blobs_of_a_file_with_a_declared_digest_are_in_one_task(
    least_unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of experts lie in four files, so many in each."""
    monkeypatch.setattr(tasks, "_LEAST_UNIT", least_unit)
    random_ = random.Random(17)
    for case in range(6):
        shares = [[random_.choice((0, 1, 3)) for _ in range(4)] for _ in range(case // 2 + 1)]
        folder = groups_of_experts(tmp_path / str(case), [[1, 0, 0, 0], *shares])
        whole, blobs = declared(folder), plan_import(folder).blobs
        assert sum(len(task.blobs) for task in whole) == len(blobs)
        places = [{part.file.name for part in parts([blob])} for blob in blobs]
        for name in {min(place) for place in places if len(place) == 1}:
            names = {
                blob.name for blob, place in zip(blobs, places, strict=True) if place == {name}
            }
            in_tasks = [{blob.name for blob in task.blobs} & names for task in whole]
            assert names in in_tasks


def parts(blobs: Sequence[PlannedBlob]) -> list[SourceTensor]:
    return [part for blob in blobs for source in blob.sources for part in source.parts.values()]


def groups_of_experts(folder: Path, shares: list[list[int]]) -> Path:
    """Write a checkpoint of a group of experts a layer, with so many of them in each file."""
    folder.mkdir()
    tensors: list[dict[str, Any]] = [{"unused.weight": np.ones(1, np.float32)} for _ in range(4)]
    for layer, share in enumerate(shares):
        names = (f"model.layers.{layer}.mlp.experts.{n}.up_proj.weight" for n in itertools.count())
        for file, experts in enumerate(share):
            tensors[file] |= {next(names): np.ones((2, 64), np.float32) for _ in range(experts)}
    for file, held in enumerate(tensors):
        own = {f"{name}.{file}" if name == "unused.weight" else name: a for name, a in held.items()}
        save_file(own, folder / f"model-0000{file + 1}-of-00004.safetensors")
    return folder


def declared(checkpoint: Path) -> tuple[Task, ...]:
    """Return the tasks of a checkpoint whose files have declared digests."""
    return tasks_of(plan_import(Declaring(checkpoint)))


class Declaring(LocalFolder):
    """A folder that declares a digest of each file."""

    def open(self, name: str, identity: Identity | None = None) -> FileReader:
        reader = super().open(name, identity)
        reader.declared = Digest.of(name.encode())
        return reader
