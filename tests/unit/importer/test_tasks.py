"""Tasks and shards: each blob is in one task, files stay whole, costs are even."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import save_file
from support import PYCODE_MOE
from support.many import sharded_checkpoint

from blobstore.errors import UsageError
from blobstore.importer.run import plan_import
from blobstore.importer.work.tasks import DividedPlan, partition
from blobstore.names import Digest


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 12))
def test_a_partition_is_whole_and_as_even_as_can_be(costs: list[int], count: int) -> None:
    ranges = partition(costs, count)
    assert len(ranges) == count
    assert [n for begin, end in ranges for n in range(begin, end)] == list(range(len(costs)))
    largest = max((sum(costs[begin:end]) for begin, end in ranges), default=0)
    assert largest == _least_largest(costs, count)


def _least_largest(costs: list[int], count: int) -> int:
    """Return the least possible sum of the largest of ``count`` ranges, by trying all cuts."""
    best = [0, *([10**9] * len(costs))]
    for _ in range(count):
        best = [
            min(max(best[begin], sum(costs[begin:end])) for begin in range(end + 1))
            for end in range(len(costs) + 1)
        ]
    return best[-1]


def test_more_ranges_than_costs() -> None:
    assert partition([5, 5], 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]
    assert partition([], 2) == [(0, 0), (0, 0)]
    assert {end - begin for begin, end in partition([1] * 30, 20)} == {1, 2}


def test_each_blob_is_in_one_task_of_one_shard(tmp_path: Path) -> None:
    divided = DividedPlan(plan_import(sharded_checkpoint(tmp_path / "m", 5), quant="int4"))
    for count in (1, 2, 3, 5, 8, 100):
        shards = [divided.shard(index, count) for index in range(count)]
        tasks = [task for shard in shards for task in shard]
        assert tasks == list(divided.tasks)
        names = [blob.name for task in tasks for blob in task.blobs]
        assert sorted(names) == sorted(blob.name for blob in divided.plan.blobs)


def test_files_stay_whole_while_there_are_enough(tmp_path: Path) -> None:
    divided = DividedPlan(plan_import(sharded_checkpoint(tmp_path / "m", 5)))
    for count in (1, 2, 3, 5):
        owners = [
            (task.file, index) for index in range(count) for task in divided.shard(index, count)
        ]
        assert len({file for file, _ in owners}) == len(set(owners)) == 5


def test_a_file_with_a_declared_digest_is_one_task() -> None:
    plan = plan_import(PYCODE_MOE)
    assert len(DividedPlan(plan).tasks) > 1
    (inventory,) = plan.inventories
    declared = tuple(replace(file, declared=Digest.of(b"")) for file in inventory.files)
    whole = replace(plan, inventories=(replace(inventory, files=declared),))
    assert len(DividedPlan(whole).tasks) == len(declared)


def test_a_part_of_a_plan_has_only_what_it_needs(tmp_path: Path) -> None:
    divided = DividedPlan(plan_import(sharded_checkpoint(tmp_path / "m", 5)))
    task = divided.tasks[0]
    part = divided.only(task.blobs)
    assert part.layers == task.blobs
    assert len(part.inventory.files) == 1
    assert set(part.inventory.tensors) == {
        name for blob in task.blobs for one in blob.tensors for name in one.source_names
    }


@pytest.mark.parametrize("index", [-1, 3, 4])
def test_a_shard_that_is_not_there(index: int, tmp_path: Path) -> None:
    divided = DividedPlan(plan_import(sharded_checkpoint(tmp_path / "m", 2)))
    with pytest.raises(UsageError, match=f"shard {index} of 3 does not exist"):
        divided.shard(index, 3)


def test_a_file_that_no_task_owns_is_hashed_by_those_that_read_of_it(tmp_path: Path) -> None:
    """Its one small tensor is an expert of a group, most of which is in the other file."""
    checkpoint = two_shards_of_experts(tmp_path / "m")
    plan = plan_import(checkpoint)
    (inventory,) = plan.inventories
    files = tuple(replace(file, declared=Digest.of(b"")) for file in inventory.files)
    divided = DividedPlan(replace(plan, inventories=(replace(inventory, files=files),)))
    assert {task.file for task in divided.tasks} == {0}
    part = divided.only(divided.plan.blobs)
    assert [file.declared is None for file in part.inventory.files] == [False, False]


def test_a_file_of_another_task_is_hashed_by_those_that_read_of_it(tmp_path: Path) -> None:
    checkpoint = two_shards_of_experts(tmp_path / "m")
    own = {"model.layers.0.mlp.down_proj.weight": np.ones((64, 256), np.float32)}
    expert = {"model.layers.0.mlp.experts.2.up_proj.weight": np.ones((64, 64), np.float32)}
    save_file(own | expert, checkpoint / "model-00002-of-00002.safetensors")
    plan = plan_import(checkpoint)
    (inventory,) = plan.inventories
    files = tuple(replace(file, declared=Digest.of(b"")) for file in inventory.files)
    divided = DividedPlan(replace(plan, inventories=(replace(inventory, files=files),)))
    assert {task.file for task in divided.tasks} == {0, 1}
    part = divided.only(divided.tasks[0].blobs)
    assert [file.declared is None for file in part.inventory.files] == [False, False]


def two_shards_of_experts(folder: Path) -> Path:
    """Return a checkpoint of one group of three experts, the last of them in a second shard."""
    folder.mkdir()
    names = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in range(3)]
    for number, held in enumerate((names[:2], names[2:]), 1):
        tensors = {name: np.ones((64, 64), np.float32) for name in held}
        save_file(tensors, folder / f"model-0000{number}-of-00002.safetensors")
    return folder
