"""Tasks and shards: each blob is in one task, files stay whole, costs are even.

A file with a declared digest is read whole by each task that needs it.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from support.checkpoints import normal, safetensors_bytes
from support.many import sharded_checkpoint
from support.streaming import SMALL, streamed

from blobstore.errors import CorruptDataError
from blobstore.importer.planfile import write_plan
from blobstore.importer.run import import_model, plan_import
from blobstore.importer.worker import commit_plan, shard_of, tasks_of, work_on_plan
from blobstore.names import Digest
from blobstore.store.memory import MemoryStore


def test_each_blob_is_in_one_task_and_files_stay_whole_while_there_are_enough(
    tmp_path: Path,
) -> None:
    plan = plan_import(sharded_checkpoint(tmp_path / "m", 5), quant="int4")
    whole = tasks_of(plan)
    names = [blob.name for task in whole for blob in task.blobs]
    assert sorted(names) == sorted(blob.name for blob in plan.blobs)
    for count in (1, 2, 5, 100):
        shards = [shard_of(whole, index, count) for index in range(count)]
        assert [task for shard in shards for task in shard] == list(whole)
        owners = {(task.file, index) for index, shard in enumerate(shards) for task in shard}
        assert len(owners) == 5 or count > 5


def test_a_file_is_read_once_by_all_workers(tmp_path: Path) -> None:
    checkpoint, path, home = tmp_path / "m", tmp_path / "plan.json", MemoryStore()
    checkpoint.mkdir()
    experts = [f"model.layers.{n // 8}.mlp.experts.{n % 8}.up_proj.weight" for n in range(32)]
    for number, names in enumerate((experts[:11], experts[11:22], experts[22:]), 1):
        tensors = {name: normal(name, 64, 64) for name in names}  # each file ends in a layer
        file = checkpoint / f"model-0000{number}-of-00003.safetensors"
        file.write_bytes(safetensors_bytes(tensors))
    with streamed(SMALL, declared=True) as fetched:
        write_plan(plan_import(checkpoint), path)
        for index in range(3):
            work_on_plan(path, shard=(index, 3), store=home)
        made = commit_plan(path, "m", store=home)
    nbytes: Counter[str] = Counter()
    for name, _, size in fetched.ranges:
        nbytes[name] += size
    assert nbytes == {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    assert made.digest == import_model(checkpoint, "m", store=MemoryStore()).digest


def test_a_worker_to_which_the_server_declares_another_digest(tmp_path: Path) -> None:
    """It would not hash a file that the others take for hashed."""
    path = tmp_path / "plan.json"
    with streamed(declared=True):
        write_plan(plan_import(sharded_checkpoint(tmp_path / "m", 2)), path)
        document = json.loads(path.read_bytes())
        files = document["source"]["files"]
        name = next(name for name in files if name.endswith(".safetensors"))
        state = files[name].rpartition(" sha256:")[0]
        for declared in ("", f" {Digest.of(b'')}"):
            files[name] = state + declared
            path.write_text(json.dumps(document))
            with pytest.raises(CorruptDataError, match="since the plan"):
                work_on_plan(path, store=MemoryStore())
