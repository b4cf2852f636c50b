"""An import from end to end: equal bytes with any threads, names, progress, healing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import PYCODE, PYCODE_MOE
from support.arrays import bits
from support.checkpoints import normal, raw_safetensors, small_tensors, write_checkpoint
from support.chunks import chunks_of
from support.stores import wrong_digests

import blobstore
from blobstore.errors import InvalidNameError, NonFiniteWeightError, UsageError
from blobstore.names import ModelName
from blobstore.store.local.store import Store, open_store

Snapshot = Callable[[Store], dict[str, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (PYCODE, {"quant": "mxfp8"}),
        (PYCODE_MOE, {"quant": "nvfp4", "experts": "stacked"}),
    ],
    ids=str,
)
def test_the_number_of_threads_changes_nothing(
    tmp_path: Path, snapshot: Snapshot, source: Path, options: dict[str, Any]
) -> None:
    one, four = (open_store(tmp_path / str(jobs)) for jobs in (1, 4))
    for store, jobs in ((one, 1), (four, 4)):
        blobstore.import_model(source, "m", store=store, jobs=jobs, **options)
    assert snapshot(one) == snapshot(four)
    assert wrong_digests(one) == []
    weights = load_file(source / "model.safetensors").values()
    with blobstore.open_model("m", store=one, verify=True) as model:
        assert model.parameters == sum(array.size for array in weights)


@pytest.mark.parametrize(
    ("path", "quant", "name"),
    [
        ("llama-3.2", "q8", "llama-3.2:int8"),
        ("llama-3.2/../llama-3.2/.", None, "llama-3.2:latest"),
        ("llama-3.2/v1.5.safetensors", "mxfp4", "v1.5:mxfp4"),
    ],
)
def test_names_made_from_the_source(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    quant: str | None,
    name: str,
) -> None:
    folder = write_checkpoint(tmp_path / "llama-3.2")
    (folder / "v1.5.safetensors").symlink_to(folder / "model.safetensors")
    result = blobstore.import_model(f"{tmp_path}/{path}", store=store, quant=quant)
    assert [str(found) for found, _ in store.models()] == [str(result.name)] == [name]
    monkeypatch.chdir(folder)
    assert str(blobstore.import_model(".", store=store).name) == "llama-3.2:latest"


@pytest.mark.parametrize("folder", ["with space", ".hidden", "é", "a:b"])
def test_a_source_whose_name_is_not_a_model_name_needs_one(
    store: Store, tmp_path: Path, folder: str
) -> None:
    write_checkpoint(tmp_path / folder)
    for name in (None, "../x"):
        with pytest.raises(InvalidNameError):
            blobstore.import_model(tmp_path / folder, name, store=store)
    assert not store.root.exists()
    text = blobstore.import_model(tmp_path / folder, "example.org/team/x:y", store=store)
    value = blobstore.import_model(tmp_path / folder, ModelName(model="z"), store=store)
    assert text.digest == value.digest


def test_what_the_result_says(store: Store, source: Path) -> None:
    plan = blobstore.plan_import(source, quant="int8")
    result = blobstore.import_model(source, store=store, quant="int8")
    tensors = small_tensors()
    stored = [path.stat().st_size for path in (store.root / "blobs").iterdir()]
    assert (result.created, result.reused, result.blobs) == (9, 0, 9)
    assert (result.stored_bytes, result.new_bytes, plan.stored_bytes) == (sum(stored),) * 3
    assert result.source_bytes == sum(array.nbytes for array in tensors.values())
    assert result.digest == store.manifest(result.name).digest == result.manifest.digest
    weights = sum(array.size for array in tensors.values())
    kept = sum(array.size for name, array in tensors.items() if "embed" in name or "norm" in name)
    assert result.bits_per_weight == pytest.approx((kept * 16 + (weights - kept) * 8.5) / weights)
    assert result.seconds > 0


def test_imports_reuse_what_they_have_in_common(
    store: Store, source: Path, snapshot: Snapshot
) -> None:
    first = blobstore.import_model(source, "m", store=store, quant="int4")
    before = snapshot(store)
    second = blobstore.import_model(source, "m", store=store, quant="int4")
    assert (second.created, second.reused, second.new_bytes) == (0, first.created, 0)
    assert (second.digest, second.stored_bytes) == (first.digest, first.stored_bytes)
    assert snapshot(store) == before
    other = blobstore.import_model(source, "m", store=store, quant="int8")
    # Embedding, norm, config.json; head and down_proj, which are int8 in both.
    assert other.reused == 5
    assert store.manifest(other.name).digest == other.digest  # the name is the new model's


@pytest.mark.parametrize(("quant", "jobs"), [(None, 4), ("int4", 1)])
def test_progress_adds_up_to_all_source_bytes(
    store: Store, tmp_path: Path, quant: str | None, jobs: int
) -> None:
    tensors = {
        **small_tensors(),
        "big.weight": np.zeros((500, 1024), np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }
    source = write_checkpoint(tmp_path / "big", tensors)
    told: list[tuple[int, str]] = []

    def progress(nbytes: int, name: str) -> None:
        told.append((nbytes, name))

    with chunks_of(65_536):
        result = blobstore.import_model(
            source, store=store, quant=quant, jobs=jobs, progress=progress
        )
    assert sum(nbytes for nbytes, _ in told) == result.source_bytes
    assert {name for nbytes, name in told if nbytes} == tensors.keys() - {"empty"}
    assert sum(name == "big.weight" for _, name in told) > 1


@pytest.mark.parametrize("jobs", [1, 2, 16])
def test_the_error_is_the_same_whatever_the_threads(
    store: Store, tmp_path: Path, jobs: int
) -> None:
    tensors: dict[str, Any] = {"0.good.weight": normal("g", 32, 64)}
    tensors["1.slow.weight"] = np.zeros((1000, 1024), np.float32)
    tensors["1.slow.weight"][-1, -1] = np.nan
    for number in range(2, 20):
        tensors[f"{number}.quick.weight"] = np.full((64, 1024), np.inf, np.float32)
    with pytest.raises(NonFiniteWeightError) as caught:
        blobstore.import_model(
            write_checkpoint(tmp_path / "bad", tensors), store=store, quant="int8", jobs=jobs
        )
    assert (caught.value.tensor, caught.value.index) == ("1.slow.weight", (999, 1023))
    assert list(store.models()) == []
    assert list((store.root / ".blobstore/tmp").iterdir()) == []


def test_an_error_stops_the_blobs_after_it(store: Store, tmp_path: Path) -> None:
    """A bad weight is reported before the hours that a large expert group would take."""
    nbytes = 128 * 2**20
    sizes = {"0.weight": (32, 64, 0, 8192), "1.weight": (nbytes // 4096, 1024, 8192, nbytes)}
    header = {
        name: {"dtype": "F32", "shape": [rows, cols], "data_offsets": [begin, begin + size]}
        for name, (rows, cols, begin, size) in sizes.items()
    }
    source = tmp_path / "m.safetensors"
    source.write_bytes(raw_safetensors(header, np.full(2048, np.nan, np.float32).tobytes()))
    os.truncate(source, source.stat().st_size + nbytes)
    told: list[int] = []
    with pytest.raises(NonFiniteWeightError):
        blobstore.import_model(
            source, store=store, quant="int8", jobs=2, progress=lambda n, _: told.append(n)
        )
    assert sum(told) < nbytes / 2


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_threads_are_a_usage_error(store: Store, source: Path, jobs: int) -> None:
    with pytest.raises(UsageError, match=str(jobs)):
        blobstore.import_model(source, store=store, jobs=jobs)
    assert not store.root.exists()


@pytest.mark.parametrize(
    ("quant", "experts"), [(None, "packed"), ("int4", "stacked"), ("nvfp4", "packed")]
)
def test_odd_tensors_beside_quantized_experts_come_back(
    store: Store, tmp_path: Path, quant: str | None, experts: str
) -> None:
    """Integers, scales of nothing, empty tensors, and names that quantized formats use."""
    group = "model.layers.0.mlp.experts"
    tensors: dict[str, Any] = {
        f"{group}.{e}.{p}.weight": normal(f"{e}{p}", 32, 64)
        for e in range(2)
        for p in ("up_proj", "down_proj")
    }
    odd = {
        f"{group}.map": np.arange(4, dtype=np.uint32),
        f"{group}.0.up_proj.bias": normal("b", 32),
        f"{group}.1.up_proj.bias": normal("b", 32),
        "x.weight": np.arange(64, dtype=np.uint32),
        "x.scale": np.ones(3, np.uint8),
        "y.weight": np.zeros((0, 64), np.float32),
        "conv.scales": normal("c", 4, 8, dtype=np.float32),
        "stem_blocks": normal("s", 4, 8, dtype=np.float32),
        "z.weight_scale": normal("z", 4, 8, dtype=np.float32),
    }
    source = write_checkpoint(tmp_path / "odd", tensors | odd)
    blobstore.import_model(source, "m", store=store, quant=quant, experts=experts)
    with blobstore.open_model("m", store=store, verify=True) as model:
        assert {name: bits(model[name].numpy()) for name in odd} == {
            name: bits(array) for name, array in odd.items()
        }
