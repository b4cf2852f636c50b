"""Imports by runs: equal bytes for runs of any size, any threads and any memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.chunks import LEAST, chunks_of
from support.stores import wrong_digests

import blobstore
from blobstore.errors import NonFiniteWeightError, StorageError, UsageError
from blobstore.importer.writing import least_memory
from blobstore.kernels.arrays import Array
from blobstore.store.local.store import Store, open_store
from blobstore.store.memory import MemoryStore

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


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "m"
    return write_checkpoint(folder, {**small_tensors(), **ODD, **EXPERTS})


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"quant": "int4"},
        {"quant": "nvfp4", "global_scale": True, "experts": "stacked"},
    ],
    ids=str,
)
def test_runs_and_memory_change_nothing(
    source: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    wanted = blobstore.import_model(source, store=MemoryStore(), jobs=1, **options).digest
    told: list[tuple[int, str]] = []
    for chunk, jobs, more in ((LEAST, 8, 10**8), (4096, 2, 0)):
        store = open_store(tmp_path / str(chunk))
        told.clear()
        with chunks_of(chunk):
            result = blobstore.import_model(
                source,
                store=store,
                jobs=jobs,
                memory=least_memory(jobs) + more,
                progress=lambda nbytes, name: told.append((nbytes, name)),
                **options,
            )
        assert result.digest == wanted
        assert sum(nbytes for nbytes, _ in told) == result.source_bytes
        assert wrong_digests(store) == []


def test_too_few_threads_and_too_little_memory_are_usage_errors(source: Path, store: Store) -> None:
    with pytest.raises(UsageError, match="-1"):
        blobstore.import_model(source, store=store, jobs=-1)
    with pytest.raises(UsageError, match="8 threads") as caught:
        blobstore.import_model(source, store=store, jobs=8, memory=least_memory(8) - 1)
    assert f"{least_memory(8):,}" in str(caught.value.hint)
    assert not store.root.exists()


@pytest.mark.parametrize(
    ("kind", "after", "jobs"),
    [(ZeroDivisionError, 0, 1), (KeyboardInterrupt, 10_000, 8), (StorageError, 100_000, 8)],
)
def test_an_error_of_the_progress_function_is_that_error(
    source: Path, store: Store, jobs: int, kind: type[BaseException], after: int
) -> None:
    """Also at the last run of a blob, and whatever other threads wait for."""
    done = 0

    def progress(nbytes: int, blob: str) -> None:
        nonlocal done
        done += nbytes
        if done >= after:
            raise kind(blob)

    with chunks_of(LEAST), pytest.raises(kind):
        blobstore.import_model(source, store=store, quant="int4", jobs=jobs, progress=progress)
    assert list(store.models()) == []
    assert list(store.root.glob(".blobstore/tmp/*")) == []


@pytest.mark.parametrize("jobs", [1, 16])
def test_the_error_is_the_same_by_any_threads(store: Store, tmp_path: Path, jobs: int) -> None:
    tensors: dict[str, Array] = {"0.good.weight": normal("g", 32, 64)}
    tensors["1.slow.weight"] = np.zeros((1000, 1024), np.float32)
    tensors["1.slow.weight"][-1, -1] = np.nan
    for number in range(2, 20):
        tensors[f"{number}.quick.weight"] = np.full((64, 1024), np.inf, np.float32)
    source = write_checkpoint(tmp_path / "bad", tensors)
    with pytest.raises(NonFiniteWeightError) as caught:
        blobstore.import_model(source, store=store, quant="int8", jobs=jobs)
    assert (caught.value.tensor, caught.value.index) == ("1.slow.weight", (999, 1023))
    assert list(store.models()) == []
    assert list((store.root / ".blobstore/tmp").iterdir()) == []
