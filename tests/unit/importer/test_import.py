"""import_model from end to end: equal bytes with any threads, names, progress, healing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import PYCODE, PYCODE_MOE, QUANT_TYPES
from support.arrays import bits
from support.checkpoints import (
    normal,
    raw_safetensors,
    safetensors_bytes,
    small_tensors,
    write_checkpoint,
)
from support.chunks import chunks_of
from support.stores import manifest_path, wrong_digests

import blobstore
from blobstore.errors import InvalidNameError, NonFiniteWeightError, UsageError
from blobstore.names import ModelName
from blobstore.store.local.store import Store, open_store

Snapshot = Callable[[Store], dict[str, str]]
FORMS = [(PYCODE, None), (PYCODE_MOE, "packed"), (PYCODE_MOE, "stacked")]


@pytest.mark.parametrize("quant", [None, *QUANT_TYPES])
@pytest.mark.parametrize(("source", "experts"), FORMS, ids=["dense", "packed", "stacked"])
def test_the_number_of_threads_changes_nothing(
    tmp_path: Path, snapshot: Snapshot, source: Path, experts: str | None, quant: str | None
) -> None:
    stores = [open_store(tmp_path / str(jobs)) for jobs in (1, 4)]
    results = [
        blobstore.import_model(source, "m", store=store, quant=quant, experts=experts, jobs=jobs)
        for store, jobs in zip(stores, (1, 4), strict=True)
    ]
    assert results[0].digest == results[1].digest
    assert snapshot(stores[0]) == snapshot(stores[1])
    assert wrong_digests(stores[0]) == []
    with blobstore.open_model("m", store=stores[0], verify=True) as model:
        assert model.parameters == sum(
            array.size for array in load_file(source / "model.safetensors").values()
        )


@pytest.mark.parametrize(("source", "experts"), FORMS, ids=["dense", "packed", "stacked"])
def test_without_quantization_every_bit_comes_back(
    store: Store, source: Path, experts: str | None
) -> None:
    blobstore.import_model(source, "m", store=store, experts=experts)
    wanted = load_file(source / "model.safetensors")
    with blobstore.open_model("m", store=store) as model:
        for name, tensor in model.items():
            if name in wanted:
                assert bits(tensor.numpy()) == bits(wanted.pop(name))
            else:
                group, projection = name.split(".experts.")
                parts = [
                    wanted.pop(f"{group}.experts.{number}.{projection}") for number in range(8)
                ]
                assert bits(tensor.numpy()) == bits(np.stack(parts))
    assert wanted == {}


@pytest.mark.parametrize(
    ("path", "quant", "name"),
    [
        ("llama-3.2", None, "llama-3.2:latest"),
        ("llama-3.2", "int4", "llama-3.2:int4"),
        ("llama-3.2", "q8", "llama-3.2:int8"),
        ("llama-3.2/", None, "llama-3.2:latest"),
        ("llama-3.2/../llama-3.2/.", None, "llama-3.2:latest"),
        ("llama-3.2/model.safetensors", "mxfp4", "model:mxfp4"),
    ],
)
def test_names_made_from_the_source(
    store: Store, tmp_path: Path, path: str, quant: str | None, name: str
) -> None:
    write_checkpoint(tmp_path / "llama-3.2")
    result = blobstore.import_model(f"{tmp_path}/{path}", store=store, quant=quant)
    assert str(result.name) == name
    assert [str(found) for found, _ in store.models()] == [name]


def test_a_file_keeps_the_dots_of_its_stem(store: Store, tmp_path: Path) -> None:
    (tmp_path / "v1.5.safetensors").write_bytes(safetensors_bytes(small_tensors()))
    assert (
        str(blobstore.import_model(tmp_path / "v1.5.safetensors", store=store).name)
        == "v1.5:latest"
    )


def test_the_current_folder_has_a_name_too(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_checkpoint(tmp_path / "here"))
    assert str(blobstore.import_model(".", store=store).name) == "here:latest"


@pytest.mark.parametrize("folder", ["with space", ".hidden", "é", "a:b"])
def test_a_source_whose_name_is_no_model_name_needs_one(
    store: Store, tmp_path: Path, folder: str
) -> None:
    write_checkpoint(tmp_path / folder)
    with pytest.raises(InvalidNameError):
        blobstore.import_model(tmp_path / folder, store=store)
    assert not store.root.exists()
    assert str(blobstore.import_model(tmp_path / folder, "good", store=store).name) == "good:latest"


def test_a_name_may_be_text_or_a_value(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    blobstore.import_model(source, "example.org/team/x:y", store=store)
    blobstore.import_model(source, ModelName(model="z"), store=store)
    assert (
        manifest_path(store, "example.org/team/x:y").read_bytes()
        == manifest_path(store, "z").read_bytes()
    )
    with pytest.raises(InvalidNameError):
        blobstore.import_model(source, "../x", store=store)


def test_what_the_result_says(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    plan = blobstore.plan_import(source, quant="int8")
    result = blobstore.import_model(source, store=store, quant="int8")
    tensors = small_tensors()
    stored = [path.stat().st_size for path in (store.root / "blobs").iterdir()]
    assert (result.created, result.reused, result.blobs) == (9, 0, 9)
    assert (result.stored_bytes, result.new_bytes, plan.stored_bytes) == (sum(stored),) * 3
    assert result.source_bytes == sum(array.nbytes for array in tensors.values())
    assert result.digest == store.manifest(result.name).digest == result.manifest.digest
    weights = sum(array.size for array in tensors.values())
    kept = (
        tensors["model.embed_tokens.weight"].size
        + tensors["model.layers.0.input_layernorm.weight"].size
    )
    assert result.bits_per_weight == pytest.approx((kept * 16 + (weights - kept) * 8.5) / weights)
    assert result.seconds > 0


def test_a_second_import_reuses_everything(
    store: Store, tmp_path: Path, snapshot: Snapshot
) -> None:
    source = write_checkpoint(tmp_path / "m")
    first = blobstore.import_model(source, store=store, quant="int4")
    before = snapshot(store)
    second = blobstore.import_model(source, store=store, quant="int4")
    assert (second.created, second.reused, second.new_bytes) == (0, first.created, 0)
    assert (second.digest, second.stored_bytes) == (first.digest, first.stored_bytes)
    assert snapshot(store) == before


def test_types_share_what_they_have_in_common(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    blobstore.import_model(source, store=store, quant="int4")
    result = blobstore.import_model(source, store=store, quant="int8")
    # Embedding, norm, config.json; head and down_proj, which are int8 in both.
    assert result.reused == 5


def test_an_import_of_a_name_again_replaces_the_model(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    blobstore.import_model(source, "x", store=store)
    result = blobstore.import_model(source, "x", store=store, quant="int8")
    assert store.manifest(result.name).digest == result.digest


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "link"])
def test_an_import_heals_every_damaged_blob(
    store: Store, tmp_path: Path, snapshot: Snapshot, damage: str
) -> None:
    source = write_checkpoint(tmp_path / "m")
    blobstore.import_model(source, store=store, quant="int4")
    before = snapshot(store)
    for path in (store.root / "blobs").iterdir():
        data = path.read_bytes()
        if damage == "flip":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        elif damage == "truncate":
            os.truncate(path, len(data) - 1)
        else:
            path.unlink()
            if damage == "link":
                path.symlink_to("/dev/null")
    result = blobstore.import_model(source, store=store, quant="int4")
    assert snapshot(store) == before
    assert not any(path.is_symlink() for path in (store.root / "blobs").iterdir())
    assert result.created == (0 if damage == "flip" else result.blobs)


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("quant", [None, "int4"])
def test_progress_adds_up_to_all_source_bytes(
    store: Store, tmp_path: Path, jobs: int, quant: str | None
) -> None:
    tensors = {
        **small_tensors(),
        "big.weight": np.zeros((500, 1024), np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }
    source = write_checkpoint(tmp_path / "m", tensors)
    told: list[tuple[int, str]] = []
    with chunks_of(65_536):
        result = blobstore.import_model(
            source,
            store=store,
            quant=quant,
            jobs=jobs,
            progress=lambda n, name: told.append((n, name)),
        )
    assert (
        sum(nbytes for nbytes, _ in told)
        == result.source_bytes
        == sum(array.nbytes for array in tensors.values())
    )
    assert {name for nbytes, name in told if nbytes} == tensors.keys() - {"empty"}
    assert sum(name == "big.weight" for _, name in told) > 1


def test_an_error_of_the_progress_function_is_the_callers_own(store: Store, tmp_path: Path) -> None:
    def progress(nbytes: int, blob: str) -> None:
        raise ZeroDivisionError(blob)

    with pytest.raises(ZeroDivisionError):
        blobstore.import_model(write_checkpoint(tmp_path / "m"), store=store, progress=progress)
    assert list(store.models()) == []
    assert list((store.root / ".blobstore/tmp").iterdir()) == []


@pytest.mark.parametrize("jobs", [1, 2, 4, 16])
def test_the_error_is_the_same_whatever_the_threads(
    store: Store, tmp_path: Path, jobs: int
) -> None:
    tensors: dict[str, np.ndarray[Any, Any]] = {"0.good.weight": normal("g", 32, 64)}
    tensors["1.slow.weight"] = np.zeros((3000, 1024), np.float32)
    tensors["1.slow.weight"][-1, -1] = np.nan
    for number in range(2, 40):
        tensors[f"{number}.quick.weight"] = np.full((1024, 1024), np.inf, np.float32)
    source = write_checkpoint(tmp_path / "m", tensors)
    with pytest.raises(NonFiniteWeightError) as caught:
        blobstore.import_model(source, store=store, quant="int8", jobs=jobs)
    assert (caught.value.tensor, caught.value.index) == ("10.quick.weight", (0, 0))
    assert list(store.models()) == []
    assert list((store.root / ".blobstore/tmp").iterdir()) == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_stops_the_blobs_after_it(store: Store, tmp_path: Path, jobs: int) -> None:
    """A bad weight is reported before the hours that a large expert group would take."""
    nbytes = 256 * 2**20
    header = {
        "0.weight": {"dtype": "F32", "shape": [32, 64], "data_offsets": [0, 8192]},
        "1.weight": {
            "dtype": "F32",
            "shape": [nbytes // 4096, 1024],
            "data_offsets": [8192, 8192 + nbytes],
        },
    }
    source = tmp_path / "m.safetensors"
    source.write_bytes(raw_safetensors(header, np.full(2048, np.nan, np.float32).tobytes()))
    os.truncate(source, source.stat().st_size + nbytes)
    told: list[int] = []
    with pytest.raises(NonFiniteWeightError):
        blobstore.import_model(
            source, store=store, quant="int8", jobs=jobs, progress=lambda n, _: told.append(n)
        )
    assert sum(told) < nbytes / 2


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_threads_are_a_usage_error(store: Store, tmp_path: Path, jobs: int) -> None:
    with pytest.raises(UsageError, match=str(jobs)):
        blobstore.import_model(write_checkpoint(tmp_path / "m"), store=store, jobs=jobs)
    assert not store.root.exists()


@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize("quant", [None, "int4", "nvfp4"])
def test_whatever_is_imported_opens(
    store: Store, tmp_path: Path, experts: str, quant: str | None
) -> None:
    """Also what looks odd beside quantized experts: integers, scales of nothing, empty tensors."""
    group = "model.layers.0.mlp.experts"
    projections = ("up_proj", "down_proj")
    tensors = {
        f"{group}.{e}.{p}.weight": normal(f"{e}{p}", 32, 64) for e in range(2) for p in projections
    }
    tensors |= {
        f"{group}.map": np.arange(4, dtype=np.uint32),
        f"{group}.0.up_proj.bias": normal("b", 32),
        f"{group}.1.up_proj.bias": normal("b", 32),
        "x.weight": np.arange(64, dtype=np.uint32),
        "x.scale": np.ones(3, np.uint8),
        "y.weight": np.zeros((0, 64), np.float32),
    }
    source = write_checkpoint(tmp_path / "m", tensors)
    blobstore.import_model(source, "m", store=store, quant=quant, experts=experts)
    with blobstore.open_model("m", store=store, verify=True) as model:
        assert model.parameters == sum(array.size for array in tensors.values())
        assert bits(model[f"{group}.map"].numpy()) == bits(tensors[f"{group}.map"])
