"""Files with declared digests that several tasks need: each is read whole once, and all agree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import normal, safetensors_bytes
from support.hub import hub
from support.servers import Answer, Asked, Server, server as run_server

import blobstore
from blobstore.errors import CorruptDataError, DocumentError, UnfinishedPlanError
from blobstore.importer.streaming.crew import Crew
from blobstore.importer.streaming.needs import Need
from blobstore.importer.streaming.segments import SourceSegment
from blobstore.importer.streaming.span_sums import SpanSums
from blobstore.importer.streaming.worklog import SegmentDone
from blobstore.importer.work import tasks
from blobstore.importer.work.receipts import Receipt, disagrees
from blobstore.importer.work.tasks import DividedPlan, FileSpan, Task
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
    fill = Crew._fill  # headers are read in other ways

    def count(self: Crew, segment: SourceSegment, data: memoryview) -> None:
        found[segment.file.name] += len(data)
        fill(self, segment, data)

    monkeypatch.setattr(Crew, "_fill", count)
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


def divided(plan: Path, server: Server) -> DividedPlan:
    with source_at(server) as folder:
        return DividedPlan(blobstore.read_plan(plan, source=folder))


def lying(checkpoint: Path, span: FileSpan) -> Answer:
    """Answer as the Hub, but with a wrong byte for those who ask for a span only."""
    honest = hub(checkpoint)

    def answer(asked: Asked) -> list[bytes]:
        parts = list(honest(asked))
        is_its_file = asked.target.endswith(f"model-{span.file + 1:05}-of-{FILES:05}.safetensors")
        if is_its_file and asked.range is not None and asked.range[0] == span.begin:
            return [parts[0][:-1] + bytes([parts[0][-1] ^ 1]), *parts[1:]]
        return parts

    return answer


def test_each_file_is_read_whole_by_one_task(
    plan: Path, server: Server, checkpoint: Path, fetched: Counter[str]
) -> None:
    store = MemoryStore()
    assert [work(plan, server, store, index, FILES) for index in range(FILES)] == [1, 1, 1]
    sizes = {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")}
    spans = {span for task in divided(plan, server).tasks for span in task.spans}
    borrowed = sum(span.end - span.begin for span in spans)
    assert 0 < borrowed < 0.2 * sum(sizes.values())
    assert fetched.total() == sum(sizes.values()) + borrowed
    assert commit(plan, server, store) == alone(server)


def test_one_worker_reads_each_file_once(
    plan: Path, server: Server, checkpoint: Path, fetched: Counter[str]
) -> None:
    store = MemoryStore()
    work(plan, server, store)
    sizes = {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")}
    assert fetched == sizes
    assert commit(plan, server, store) == alone(server)


@pytest.mark.parametrize("order", [range(FILES), reversed(range(FILES))])
def test_borrowed_bytes_that_are_wrong_never_become_a_model(
    order: Any, plan: Path, server: Server, checkpoint: Path
) -> None:
    store = MemoryStore()
    borrower = next(
        task
        for task in divided(plan, server).tasks
        for span in task.spans
        if span.file not in task.owned
    )
    span = next(span for span in borrower.spans if span.file not in borrower.owned)
    server.play(lying(checkpoint, span))
    for index in order:
        work(plan, server, store, index, FILES)
    with pytest.raises(UnfinishedPlanError, match="bytes that their files do not have") as error:
        commit(plan, server, store)
    assert error.value.tasks == (borrower.number,)
    server.play(hub(checkpoint))
    assert work(plan, server, store) == 1
    assert commit(plan, server, store) == alone(server)


def test_borrowed_bytes_that_are_wrong_are_not_used_by_a_later_import(
    plan: Path, server: Server, checkpoint: Path
) -> None:
    store = MemoryStore()
    every = divided(plan, server).tasks
    spans = {span for task in every for span in task.spans if span.file not in task.owned}
    for span in spans:
        server.play(lying(checkpoint, span))
        for index in range(FILES):
            work(plan, server, store, index, FILES)
    server.play(hub(checkpoint))
    with source_at(server) as folder:
        found = blobstore.import_model(folder, "m", store=store, quant="int4")
    assert found.digest == alone(server)


def test_only_the_task_that_hashed_a_file_says_what_its_bytes_are() -> None:
    """Each task owns its own file, and the third borrows what the second borrows of the first."""
    first, second = FileSpan(0, 0, 10), FileSpan(1, 0, 10)
    spans = [(first,), (first, second), (first, second)]
    one, two, three = (
        Task(number, number, (), frozenset([number]), own) for number, own in enumerate(spans)
    )
    right, wrong = Digest.of(b"right"), Digest.of(b"wrong")
    receipts = {
        0: Receipt(0, (), {first: right}),
        1: Receipt(1, (), {first: wrong, second: right}),
        2: Receipt(2, (), {first: right, second: right}),
    }
    asked: list[int] = []

    def read(task: Task) -> Receipt | None:
        asked.append(task.number)
        return receipts.get(task.number)

    owners = {0: one, 1: two, 2: three}
    found = [disagrees(task, receipts[task.number], owners, read) for task in (one, two, three)]
    assert (found, asked) == ([False, True, False], [0, 0, 1])
    del receipts[0]
    assert not disagrees(two, receipts[1], owners, read)


def test_a_worker_to_which_the_server_declares_another_digest(
    plan: Path, server: Server, checkpoint: Path
) -> None:
    whole = divided(plan, server)
    portion = whole.portion([whole.tasks[0]])
    portion.check()
    for other in (Digest.of(b""), None):
        with pytest.raises(CorruptDataError, match="its server declares the digest sha256:"):
            replace(portion, owned=dict.fromkeys(portion.owned, other)).check()


def test_a_receipt_without_its_spans_is_damaged(plan: Path, server: Server) -> None:
    store = MemoryStore()
    work(plan, server, store)
    path = Path(f"{plan}.receipts") / "000000.json"
    value = json.loads(path.read_bytes())
    path.write_text(json.dumps(value | {"spans": value["spans"][1:]}))
    with pytest.raises(DocumentError, match="the spans are not those of the task"):
        commit(plan, server, store)
    assert work(plan, server, store) == 1
    commit(plan, server, store)


@pytest.mark.parametrize("killed_after", range(5))
def test_sums_go_on_after_a_kill(
    killed_after: int, plan: Path, server: Server, checkpoint: Path
) -> None:
    file = divided(plan, server).files[0]
    data = (checkpoint / file.name).read_bytes()
    cuts = [0, 100, 1000, 5000, 9000, len(data)]
    segments = [
        SourceSegment(number, file, begin, end)
        for number, (begin, end) in enumerate(pairwise(cuts))
    ]
    spans = [Need(file.path, *span) for span in ((50, 60), (90, 8000), (8000, len(data)))]
    first = SpanSums(spans)
    logged = []
    for segment in segments[:killed_after]:
        sums = first.add(segment, memoryview(data)[segment.begin : segment.end])
        done = SegmentDone(segment.number, sums=sums)
        logged.append((segment, SegmentDone.decode(json.loads(json.dumps(done.encode())))))
    second = SpanSums(spans, logged)
    for segment in segments[killed_after:]:
        second.add(segment, memoryview(data)[segment.begin : segment.end])
    assert second.digests == {span: Digest.of(data[span.begin : span.end]) for span in spans}
