"""Folders and files to import: shards, links, pipes, partial downloads, odd names and shapes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arrays import bits
from support.checkpoints import (
    normal,
    safetensors_bytes,
    small_tensors,
    write_checkpoint,
    write_shards,
)
from support.stores import files_may_be_open

import blobstore
from blobstore import errors
from blobstore.names import ModelName
from blobstore.store.local.store import Store


def dangling(path: Path) -> None:
    path.symlink_to("gone")


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "m", [small_tensors(), small_tensors()])
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(errors.CorruptDataError, match="both hold"):
        blobstore.plan_import(source)


def cut(path: Path) -> None:
    path.write_bytes(safetensors_bytes(small_tensors())[:-1])


def lfs_pointer(path: Path) -> None:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("name", "make", "kind", "says"),
    [
        ("config.json", os.mkfifo, errors.StorageError, "config.json"),
        ("tokenizer.json", dangling, errors.NotFoundError, "tokenizer.json"),
        (f"{WEIGHTS}.index.json", dangling, errors.NotFoundError, f"{WEIGHTS}.index.json"),
        (WEIGHTS, dangling, errors.NotFoundError, WEIGHTS),
        (WEIGHTS, lambda path: path.symlink_to("/dev/zero"), errors.StorageError, WEIGHTS),
        (WEIGHTS, Path.touch, errors.CorruptDataError, WEIGHTS),
        (WEIGHTS, cut, errors.CorruptDataError, WEIGHTS),
        (WEIGHTS, lfs_pointer, errors.CorruptDataError, "git-lfs"),
    ],
)
def test_files_that_can_not_be_read_are_an_error_at_once(
    store: Store,
    tmp_path: Path,
    name: str,
    make: Callable[[Path], None],
    kind: type[errors.BlobStoreError],
    says: str,
) -> None:
    """Dangling links are a partial download. They belong to the model, and are not left out."""
    path = write_checkpoint(tmp_path / "m") / name
    path.unlink(missing_ok=True)
    make(path)
    for source in (tmp_path / "m", path) if name == WEIGHTS else (tmp_path / "m",):
        with pytest.raises(kind, match=says):
            blobstore.import_model(source, "m", store=store)
    assert not store.root.exists()


@pytest.mark.parametrize("path", ["nowhere", "a" * 300, "a\0b", "\udcff/" + "x" * 300])
def test_a_path_where_no_file_can_be(path: str) -> None:
    with pytest.raises((errors.NotFoundError, errors.StorageError)):
        blobstore.plan_import(path)


@pytest.mark.parametrize("name", [b"\xff.json", b"new\nline.json", b"\xff.safetensors"])
def test_names_of_files_that_could_not_be_files_again(tmp_path: Path, name: bytes) -> None:
    folder = write_checkpoint(tmp_path / "m")
    path = Path(os.fsdecode(os.fsencode(folder) + b"/" + name))
    path.write_bytes(safetensors_bytes(small_tensors()) if b"safe" in name else b"{}")
    with pytest.raises(errors.UnsupportedSourceError, match="can't be stored"):
        blobstore.plan_import(path if b"safe" in name else folder)


def test_more_shards_than_files_may_be_open(tmp_path: Path, store: Store) -> None:
    names = [f"{number}.weight" for number in range(100)]
    source = write_shards(tmp_path / "m", [{name: normal(name, 4, 4)} for name in names])
    with files_may_be_open(len(list(Path("/proc/self/fd").iterdir())) + 28):
        blobstore.import_model(source, "m", store=store)
    with blobstore.open_model("m", store=store) as model:
        assert set(model) == set(names)


@pytest.mark.parametrize(
    ("path", "quant", "name"),
    [
        ("llama-3.2", "q8", "llama-3.2:int8"),
        ("llama-3.2/../llama-3.2/.", None, "llama-3.2:latest"),
        ("llama-3.2/v1.5.safetensors", "mxfp4", "v1.5:mxfp4"),
    ],
)
def test_its_name(store: Store, tmp_path: Path, path: str, quant: str | None, name: str) -> None:
    folder = write_checkpoint(tmp_path / "llama-3.2")
    (folder / "v1.5.safetensors").symlink_to(folder / "model.safetensors")
    result = blobstore.import_model(f"{tmp_path}/{path}", store=store, quant=quant)
    assert [str(found) for found, _ in store.models()] == [str(result.name)] == [name]


@pytest.mark.parametrize("folder", ["with space", "é"])
def test_a_source_without_a_model_name_needs_one(store: Store, tmp_path: Path, folder: str) -> None:
    write_checkpoint(tmp_path / folder)
    for name in (None, "../x"):
        with pytest.raises(errors.InvalidNameError):
            blobstore.import_model(tmp_path / folder, name, store=store)
    assert not store.root.exists()
    text = blobstore.import_model(tmp_path / folder, "example.org/team/x:y", store=store)
    value = blobstore.import_model(tmp_path / folder, ModelName(model="z"), store=store)
    assert text.digest == value.digest


@pytest.mark.parametrize(("quant", "experts"), [("int4", "stacked"), ("nvfp4", "packed")])
def test_odd_tensors_come_back(store: Store, tmp_path: Path, quant: str, experts: str) -> None:
    """Integers, scales of nothing, empty tensors, and names that quantized formats use."""
    group = "model.layers.0.mlp.experts"
    tensors = {f"{group}.{e}.up_proj.weight": normal(str(e), 32, 64) for e in range(2)}
    odd: dict[str, Any] = {
        f"{group}.map": np.arange(4, dtype=np.uint32),
        **{f"{group}.{e}.up_proj.bias": normal("b", 32) for e in range(2)},
        "x.weight": np.arange(64, dtype=np.uint32),
        "x.scale": np.ones(3, np.uint8),
        "y.weight": np.zeros((0, 64), np.float32),
        "stem_blocks": normal("s", 4, 8, dtype=np.float32),
    }
    source = write_checkpoint(tmp_path / "odd", tensors | odd)
    blobstore.import_model(source, "m", store=store, quant=quant, experts=experts)
    with blobstore.open_model("m", store=store, verify=True) as model:
        for name, array in odd.items():
            assert bits(model[name].numpy()) == bits(array), name
