"""Imports by runs: equal bytes for runs of any size, any threads and any memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.chunks import LEAST, chunks_of
from support.inventories import inventory, source_tensor
from support.stores import wrong_digests

import blobstore
from blobstore.errors import StorageError, UsageError
from blobstore.importer.making import CHUNK, GlobalScale, Values, runs_of
from blobstore.importer.options import ImportOptions
from blobstore.importer.plan import make_plan
from blobstore.importer.writing import least_memory
from blobstore.kernels.arrays import Array
from blobstore.store.local.store import Store, open_store

UP = "model.layers.0.mlp.up_proj.weight"
ODD: dict[str, Array] = {
    "odd.empty": np.zeros((0, 64), np.float32),
    "odd.scalar": np.array(3, np.int64),
    "odd.f64": np.arange(3000, dtype=np.float64),
    "odd.bytes": np.arange(5001, dtype=np.uint32).astype(np.uint8),
    "odd." + "long name " * 5000: normal("long", 100, dtype=np.float16),
}
EXPERTS = {
    f"model.layers.1.mlp.experts.{expert}.{name}.weight": normal(f"{expert}{name}", 32, 64)
    for expert in range(6)
    for name in ("down_proj", "gate_proj", "up_proj")
}
FORMS: dict[str, dict[str, Any]] = {
    "cast": {"dtype": "float32"},
    "int4": {"quant": "int4"},
    "nvfp4-global": {"quant": "nvfp4", "global_scale": True, "experts": "stacked"},
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
    for number, (chunk, jobs) in enumerate([(LEAST, 8), (4096, 2)]):
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


@pytest.mark.parametrize(("jobs", "more"), [(1, 0), (8, 0), (8, 10_000)])
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


@pytest.mark.parametrize(
    ("kind", "after", "jobs"),
    [
        (ZeroDivisionError, 0, 1),
        (KeyboardInterrupt, 10_000, 8),
        (SystemExit, 10**6, 1),
        (StorageError, 10**6, 8),
    ],
)
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
    assert list(store.root.glob(".blobstore/tmp/*")) == []
