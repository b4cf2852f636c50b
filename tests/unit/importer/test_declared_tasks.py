"""Files with declared digests that several tasks need: each of them reads the whole file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import normal, safetensors_bytes
from support.hub import hub
from support.servers import Asked, Server, server as run_server

import blobstore
from blobstore.errors import CorruptDataError, DigestMismatchError
from blobstore.importer import worker as tasks
from blobstore.importer.schedule import FarWork
from blobstore.importer.segments import Buffer, LoadedSegment, Segment
from blobstore.names import Digest
from blobstore.source.folders import Folder
from blobstore.store.memory import MemoryStore

EXPERTS = 8
FILES = 3


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with run_server() as running:
        yield running


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tasks be of single files, though the source is small."""
    monkeypatch.setattr(tasks, "_LEAST_UNIT", 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of two layers of experts in three files: each file ends in a layer."""
    folder = tmp_path_factory.mktemp("experts")
    names = [
        f"model.layers.{layer}.mlp.experts.{number}.up_proj.weight"
        for layer in range(4)
        for number in range(EXPERTS)
    ]
    cuts = [0, 11, 22, len(names)]
    for file, (begin, end) in enumerate(pairwise(cuts), 1):
        tensors = {name: normal(name, 64, 64) for name in names[begin:end]}
        path = folder / f"model-{file:05}-of-{FILES:05}.safetensors"
        path.write_bytes(safetensors_bytes(tensors))
    return folder


def source_at(server: Server) -> Folder:
    return blobstore.open_folder("hf://org/name", endpoint=server.at("").rstrip("/"))


@pytest.fixture
def plan(server: Server, checkpoint: Path, tmp_path: Path) -> Path:
    server.play(hub(checkpoint))
    with source_at(server) as folder:
        blobstore.write_plan(blobstore.plan_import(folder, quant="int4"), tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how many bytes are fetched of each file."""
    found: Counter[str] = Counter()
    fetch = FarWork._fetch  # headers are read in other ways

    def count(self: FarWork, segment: Segment, buffer: Buffer) -> LoadedSegment:
        found[segment.file.name] += segment.nbytes
        return fetch(self, segment, buffer)

    monkeypatch.setattr(FarWork, "_fetch", count)
    return found


def work(plan: Path, server: Server, store: Any, index: int = 0, count: int = 1) -> int:
    with source_at(server) as folder:
        made = blobstore.work_on_plan(plan, shard=(index, count), store=store, source=folder)
    return made.made


def commit(plan: Path, server: Server, store: Any) -> Digest:
    with source_at(server) as folder:
        return blobstore.commit_plan(plan, "m", store=store, source=folder).digest


def alone(server: Server) -> Digest:
    with source_at(server) as folder:
        return blobstore.import_model(folder, "m", store=MemoryStore(), quant="int4").digest


def test_each_file_is_read_whole_by_the_tasks_that_need_it(
    plan: Path, server: Server, checkpoint: Path, fetched: Counter[str]
) -> None:
    store = MemoryStore()
    assert [work(plan, server, store, index, FILES) for index in range(FILES)] == [1, 1, 1]
    sizes = {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")}
    for name, size in sizes.items():
        assert fetched[name] in (size, 2 * size)  # each file ends in a layer that is in the next
    assert commit(plan, server, store) == alone(server)


def test_a_worker_to_which_the_server_declares_another_digest(plan: Path, server: Server) -> None:
    """It would not hash a file that the others take for hashed."""
    document = json.loads(plan.read_bytes())
    files = document["source"]["files"]
    name = next(name for name in files if name.endswith(".safetensors"))
    state = files[name].rpartition(" sha256:")[0]
    for declared in ("", f" {Digest.of(b'')}"):
        files[name] = state + declared
        plan.write_text(json.dumps(document))
        with pytest.raises(CorruptDataError, match="written to since the plan"):
            work(plan, server, MemoryStore())


def test_wrong_bytes_never_become_a_model(plan: Path, server: Server, checkpoint: Path) -> None:
    store = MemoryStore()
    honest = hub(checkpoint)

    def answer(asked: Asked) -> list[bytes]:
        parts = list(honest(asked))
        if asked.range is not None and len(parts[0]) > 1000:
            return [parts[0][:-1] + bytes([parts[0][-1] ^ 1]), *parts[1:]]
        return parts

    server.play(answer)
    with pytest.raises(DigestMismatchError):
        work(plan, server, store)
    server.play(honest)
    assert work(plan, server, store) == FILES
    assert commit(plan, server, store) == alone(server)
