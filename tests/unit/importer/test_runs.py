"""Imports by runs: equal bytes for runs of any size, any threads and any memory."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import normal, safetensors_bytes, small_tensors, write_checkpoint
from support.chunks import LEAST, chunks_of
from support.inventories import inventory, source_tensor
from support.stores import wrong_digests

import blobstore
from blobstore.errors import NonFiniteWeightError, StorageError, UsageError
from blobstore.formats.dtypes import DType
from blobstore.importer.making import CHUNK, GlobalScale, Values, runs_of
from blobstore.importer.options import Experts, ImportOptions
from blobstore.importer.plan import make_plan
from blobstore.importer.writing import least_memory
from blobstore.kernels.arrays import Array
from blobstore.source.weights import SourceReaders
from blobstore.store.local.session import BlobWriter, LocalSession
from blobstore.store.local.store import Store, open_store

UP = "model.layers.0.mlp.up_proj.weight"
ODD: dict[str, Array] = {
    "odd.empty": np.zeros((0, 64), np.float32),
    "odd.scalar": np.array(3, np.int64),
    "odd.f64": np.arange(3000, dtype=np.float64),
    "odd.bytes": np.arange(5001, dtype=np.uint32).astype(np.uint8),
    "odd." + "long name " * 500: normal("long", 100, dtype=np.float16),
}
EXPERTS = {
    f"model.layers.1.mlp.experts.{expert}.{name}.weight": normal(f"{expert}{name}", 32, 64)
    for expert in range(6)
    for name in ("down_proj", "gate_proj", "up_proj")
}
FORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "cast": {"dtype": "float32"},
    "int4": {"quant": "int4"},
    "int8-stacked": {"quant": "int8", "experts": "stacked"},
    "nvfp4-global": {"quant": "nvfp4", "global_scale": True, "experts": "stacked"},
    "mxfp8-f32": {"quant": "mxfp8", "dtype": "float32"},
    "int4-search": {"quant": "int4", "method": "search"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of weights, experts and odd tensors."""
    return write_checkpoint(
        tmp_path_factory.mktemp("source") / "m", {**small_tensors(), **ODD, **EXPERTS}
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_size_of_runs_and_the_number_of_threads_change_nothing(
    source: Path, tmp_path: Path, form: str
) -> None:
    wanted = blobstore.import_model(
        source, store=open_store(tmp_path / "whole"), jobs=1, **FORMS[form]
    ).digest
    told: list[int] = []
    for number, (chunk, jobs) in enumerate(
        [(LEAST, 1), (LEAST, 8), (4096, 2), (4096, 8), (65_536, 3)]
    ):
        store = open_store(tmp_path / str(number))
        told.clear()
        with chunks_of(chunk):
            result = blobstore.import_model(
                source,
                store=store,
                jobs=jobs,
                progress=lambda nbytes, _: told.append(nbytes),
                **FORMS[form],
            )
        assert result.digest == wanted, (chunk, jobs)
        assert sum(told) == result.source_bytes
        assert wrong_digests(store) == []


@pytest.mark.parametrize("jobs", [1, 2, 8])
@pytest.mark.parametrize("more", [0, 1, 10_000, 10**7])
def test_memory_changes_nothing(source: Path, store: Store, jobs: int, more: int) -> None:
    with chunks_of(4096):
        memory = least_memory(jobs) + more
        digests = {
            blobstore.import_model(
                source, store=store, quant="int4", jobs=jobs, memory=memory, verify_reuse=False
            ).digest,
            blobstore.import_model(
                source, "other", store=open_store(store.root / "other"), quant="int4"
            ).digest,
        }
    assert len(digests) == 1


@pytest.mark.parametrize("jobs", [1, 8])
def test_too_little_memory_is_a_usage_error_that_says_how_much_is_enough(
    source: Path, store: Store, jobs: int
) -> None:
    with pytest.raises(UsageError, match=f"{jobs} threads") as caught:
        blobstore.import_model(source, store=store, jobs=jobs, memory=least_memory(jobs) - 1)
    assert f"{least_memory(jobs):,}" in str(caught.value.hint)
    assert not store.root.exists()


def test_block_fp8_is_told_of_to_the_last_byte() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = [
        source_tensor(name, 1000, 3000, dtype=DType.F8_E4M3),
        source_tensor(f"{name}_scale_inv", 8, 24, dtype=DType.F32),
    ]
    config: dict[str, Any] = {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    }
    (blob,) = make_plan(inventory(tensors, **config), ImportOptions.parse()).blobs
    assert not blob.tensors[0].copies
    with chunks_of(4096):
        runs = list(runs_of(blob))
    assert len(runs) > 500
    assert (
        sum(run.source_bytes for run in runs)
        == blob.source_bytes
        == sum(tensor.nbytes for tensor in tensors)
    )


def test_a_large_weight_is_cut_and_its_companions_lie_in_the_gap_behind_it() -> None:
    tensor = source_tensor(UP, 4096, 8192)
    options = ImportOptions.parse(quant="nvfp4", global_scale=True)
    (blob,) = make_plan(inventory([tensor]), options).blobs
    *first, last = runs_of(blob)
    assert [run.gap for run in first] == [0] * len(first)
    assert last.gap == blob.size - last.end == 4096 * 8192 // 16 + 4
    assert all(isinstance(step, Values) for run in first[1:] for step in run.steps)
    assert isinstance(last.steps[-1], GlobalScale)
    assert all(
        step.count * 2 <= CHUNK
        for run in first[1:]
        for step in run.steps
        if isinstance(step, Values)
    )


def test_a_run_of_many_tensors_takes_time_for_each_one_once() -> None:
    """30,000 numbers are one run, which took twice as long as their plan; 200,000 took minutes."""
    tensors = (source_tensor(f"model.layers.0.mlp.experts.{n}.w.weight", 1) for n in range(30_000))
    begun = time.thread_time()
    (blob,) = make_plan(inventory(tensors), ImportOptions(experts=Experts.PACKED)).blobs
    planned = time.thread_time()
    *_, last = runs_of(blob)
    assert len(last.steps) > 29_000
    assert time.thread_time() - planned < (planned - begun) / 1.5


def test_a_header_larger_than_a_run_is_cut_too(tmp_path: Path, store: Store) -> None:
    tensors = {
        f"model.layers.0.mlp.experts.{'n' * 2000}.{number}": normal("x", 4) for number in range(30)
    }
    source = write_checkpoint(tmp_path / "m", tensors)
    with chunks_of(4096):
        blobstore.import_model(source, "m", store=store)
    assert wrong_digests(store) == []
    with blobstore.open_model("m", store=store, verify=True) as model:
        assert len(model) == 30


@pytest.mark.parametrize("seed", range(6))
def test_the_error_is_the_same_with_any_number_of_threads(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    tensors = {
        f"{number:02}.weight": normal(str(number), 64, 64, dtype=np.float32) for number in range(12)
    }
    bad = sorted(
        (chance.randrange(12), chance.randrange(64), chance.randrange(64)) for _ in range(5)
    )
    for number, row, column in bad:
        tensors[f"{number:02}.weight"][row, column] = chance.choice([np.nan, np.inf])
    source = write_checkpoint(tmp_path / "m", tensors)
    errors = set()
    for jobs in (1, 2, 3, 8):
        store = open_store(tmp_path / f"store{jobs}")
        with chunks_of(LEAST), pytest.raises(NonFiniteWeightError) as caught:
            blobstore.import_model(source, store=store, quant="int8", jobs=jobs)
        errors.add((caught.value.tensor, caught.value.index))
        assert list(store.models()) == []
        assert list(store.root.glob(".blobstore/tmp/*")) == []
    assert len(errors) == 1


@pytest.mark.parametrize("jobs", [1, 8])
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit, StorageError])
@pytest.mark.parametrize("after", [0, 10_000, 10**6])
def test_an_error_of_the_progress_function_is_that_error(
    source: Path, store: Store, jobs: int, kind: type[BaseException], after: int
) -> None:
    """Also at the last run of a blob, and whatever other threads wait for."""
    done = 0

    def progress(nbytes: int, blob: str) -> None:
        nonlocal done
        done += nbytes
        if done >= min(after, 100_000):
            raise kind(blob)

    with chunks_of(LEAST), pytest.raises(kind):
        blobstore.import_model(source, store=store, quant="int4", jobs=jobs, progress=progress)
    assert list(store.models()) == []


@pytest.mark.parametrize("jobs", [1, 8])
def test_an_error_in_noting_a_finished_blob_is_that_error(
    source: Path, store: Store, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(LocalSession, "note", refuse)
    with chunks_of(LEAST), pytest.raises(StorageError, match="the disk is full"):
        blobstore.import_model(source, store=store, jobs=jobs)
    assert list(store.root.glob(".blobstore/tmp/*")) == []


@pytest.mark.parametrize("jobs", [1, 8])
def test_a_blob_that_can_not_be_begun_is_an_error_after_those_of_the_blobs_before_it(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    """The first weight is slow and bad; meanwhile no further file can be made."""
    tensors = {"0.weight": np.full((64, 64), np.nan, np.float32), "1.weight": normal("1", 64, 64)}
    (tmp_path / "m.safetensors").write_bytes(safetensors_bytes(tensors))
    real = LocalSession.writer
    begun: list[int] = []

    def writer(session: LocalSession, size: int, *arguments: Any) -> BlobWriter:
        begun.append(size)
        if len(begun) == 2:
            raise StorageError("no room for another file")
        return real(session, size, *arguments)

    monkeypatch.setattr(LocalSession, "writer", writer)
    read = SourceReaders.readinto

    def slow(*arguments: Any) -> None:
        time.sleep(0.05)
        read(*arguments)

    monkeypatch.setattr(SourceReaders, "readinto", slow)
    with pytest.raises(NonFiniteWeightError) as caught:
        blobstore.import_model(tmp_path / "m.safetensors", store=store, quant="int8", jobs=jobs)
    assert caught.value.tensor == "0.weight"
