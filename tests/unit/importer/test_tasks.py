"""Tasks and shards: each blob is in one task, files stay whole, costs are even.

A file with a declared digest is read whole by each task that needs it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import save_file
from support.checkpoints import normal, safetensors_bytes
from support.hub import hub
from support.many import sharded_checkpoint
from support.servers import server

import blobstore
from blobstore.errors import CorruptDataError
from blobstore.importer import worker as tasks
from blobstore.importer.outputs import PlannedBlob
from blobstore.importer.run import plan_import
from blobstore.importer.schedule import FarWork
from blobstore.importer.segments import Buffer, LoadedSegment, Segment
from blobstore.importer.worker import Task, shard_of, tasks_of
from blobstore.io.ranges import FileReader, Identity
from blobstore.names import Digest
from blobstore.source.folders import Folder, LocalFolder, SourceTensor
from blobstore.store.memory import MemoryStore


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


@contextmanager
def published(checkpoint: Path) -> Iterator[Folder]:
    """Give a checkpoint as a hub serves it: with a digest of each file."""
    with server() as running:
        running.play(hub(checkpoint))
        with blobstore.open_folder("hf://org/name", endpoint=running.at("").rstrip("/")) as folder:
            yield folder


def test_each_file_is_read_whole_by_the_tasks_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_LEAST_UNIT", 0)
    checkpoint = tmp_path / "m"
    checkpoint.mkdir()
    experts = [f"model.layers.{n // 8}.mlp.experts.{n % 8}.up_proj.weight" for n in range(32)]
    for number, names in enumerate((experts[:11], experts[11:22], experts[22:]), 1):
        tensors = {name: normal(name, 64, 64) for name in names}  # each file ends in a layer
        file = checkpoint / f"model-0000{number}-of-00003.safetensors"
        file.write_bytes(safetensors_bytes(tensors))
    sizes = {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")}
    fetched: Counter[str] = Counter()
    fetch = FarWork._fetch  # headers are read in other ways

    def count(self: FarWork, segment: Segment, buffer: Buffer) -> LoadedSegment:
        fetched[segment.file.name] += segment.nbytes
        return fetch(self, segment, buffer)

    monkeypatch.setattr(FarWork, "_fetch", count)
    home, plan = MemoryStore(), tmp_path / "plan.json"
    with published(checkpoint) as folder:
        blobstore.write_plan(plan_import(folder), plan)
        for index in range(3):
            assert blobstore.work_on_plan(plan, shard=(index, 3), store=home, source=folder).made
        assert all(fetched[name] in (size, 2 * size) for name, size in sizes.items())
        made = blobstore.commit_plan(plan, "m", store=home, source=folder)
        assert made.digest == blobstore.import_model(folder, "m", store=MemoryStore()).digest


def test_a_worker_to_which_the_server_declares_another_digest(tmp_path: Path) -> None:
    """It would not hash a file that the others take for hashed."""
    plan = tmp_path / "plan.json"
    with published(sharded_checkpoint(tmp_path / "m", 2)) as folder:
        blobstore.write_plan(plan_import(folder), plan)
        document = json.loads(plan.read_bytes())
        files = document["source"]["files"]
        name = next(name for name in files if name.endswith(".safetensors"))
        state = files[name].rpartition(" sha256:")[0]
        for declared in ("", f" {Digest.of(b'')}"):
            files[name] = state + declared
            plan.write_text(json.dumps(document))
            with pytest.raises(CorruptDataError, match="written to since the plan"):
                blobstore.work_on_plan(plan, store=MemoryStore(), source=folder)
