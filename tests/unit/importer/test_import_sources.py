"""Folders and files to import: shards, links, pipes, partial downloads, odd names and shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.arrays import bits
from support.checkpoints import (
    LLAMA_CONFIG,
    normal,
    safetensors_bytes,
    small_tensors,
    write_checkpoint,
)

import blobstore
from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    NotFoundError,
    StorageError,
    UnsupportedSourceError,
)
from blobstore.store.local.store import Store

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_shards(folder: Path, *, index: bool = True) -> Path:
    """Write a checkpoint of two shards, the embedding in the second, and its index."""
    shards = {name: TWO if name == "model.embed_tokens.weight" else ONE for name in small_tensors()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    for file in (ONE, TWO):
        tensors = {name: array for name, array in small_tensors().items() if shards[name] == file}
        (folder / file).write_bytes(safetensors_bytes(tensors))
    if index:
        document = {"metadata": {"total_size": 1}, "weight_map": shards}
        (folder / INDEX).write_text(json.dumps(document))
    return folder


def expect_everything(store: Store, source: Path) -> None:
    blobstore.import_model(source, "m", store=store)
    with blobstore.open_model("m", store=store, verify=True) as model:
        assert {name: bits(tensor.numpy()) for name, tensor in model.items()} == {
            name: bits(array) for name, array in small_tensors().items()
        }


def test_a_bare_file(store: Store, tmp_path: Path) -> None:
    expect_everything(store, write_checkpoint(tmp_path / "m") / "model.safetensors")
    with blobstore.open_model("m", store=store) as model:
        assert (model.documents(), model.config.capabilities) == (["blobstore.json"], [])


def dangling(path: Path) -> None:
    path.symlink_to("gone")


@pytest.mark.parametrize(
    ("name", "make", "index"),
    [
        ("config.json", os.mkfifo, True),
        ("tokenizer.json", dangling, False),
        (INDEX, dangling, True),
        (TWO, os.mkfifo, True),
        (TWO, dangling, False),
    ],
)
def test_a_file_of_the_checkpoint_that_can_not_be_read_is_not_left_out(
    store: Store, tmp_path: Path, name: str, make: Callable[[Path], None], index: bool
) -> None:
    """A partial download is a folder with dangling links, which belong to the model."""
    source = write_shards(tmp_path / "m", index=index)
    (source / name).unlink(missing_ok=True)
    make(source / name)
    with pytest.raises((NotFoundError, StorageError), match=name):
        blobstore.import_model(source, store=store)
    assert not store.root.exists()


def cut(path: Path) -> None:
    path.write_bytes(safetensors_bytes(small_tensors())[:-1])


def lfs_pointer(path: Path) -> None:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (dangling, NotFoundError, "model.safetensors"),
        (lambda path: path.symlink_to("/dev/zero"), StorageError, "model.safetensors"),
        (Path.touch, CorruptDataError, "model.safetensors"),
        (cut, CorruptDataError, "model.safetensors"),
        (lfs_pointer, CorruptDataError, "git-lfs"),
    ],
)
def test_weights_that_can_not_be_read_are_an_error_at_once(
    store: Store,
    tmp_path: Path,
    make: Callable[[Path], None],
    kind: type[BlobStoreError],
    says: str,
) -> None:
    weights = write_checkpoint(tmp_path / "m") / "model.safetensors"
    weights.unlink()
    make(weights)
    for source in (tmp_path / "m", weights):
        with pytest.raises(kind, match=says):
            blobstore.import_model(source, "m", store=store)
    assert not store.root.exists()


@pytest.mark.parametrize("path", ["nowhere", "a" * 300, "a\0b", "\udcff/" + "x" * 300])
def test_a_path_where_no_file_can_be(path: str) -> None:
    with pytest.raises((NotFoundError, StorageError)):
        blobstore.plan_import(path)


@pytest.mark.parametrize("name", [b"\xff.json", b"new\nline.json", b"\xff.safetensors"])
def test_names_of_files_that_could_not_be_files_again(tmp_path: Path, name: bytes) -> None:
    folder = write_checkpoint(tmp_path / "m")
    path = Path(os.fsdecode(os.fsencode(folder) + b"/" + name))
    path.write_bytes(safetensors_bytes(small_tensors()) if b"safe" in name else b"{}")
    with pytest.raises(UnsupportedSourceError, match="can't be stored"):
        blobstore.plan_import(path if b"safe" in name else folder)


def test_more_shards_than_files_may_be_open(tmp_path: Path, store: Store) -> None:
    (tmp_path / "m").mkdir()
    for number in range(40):
        path = tmp_path / "m" / f"model-{number + 1:05d}-of-00040.safetensors"
        path.write_bytes(safetensors_bytes({f"{number}.weight": normal(str(number), 4, 4)}))
    code = (
        "import resource, sys, blobstore\n"
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, most))\n"
        "blobstore.import_model(sys.argv[1], 'm', store=blobstore.open_store(sys.argv[2]))\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "m", store.root], check=True)
    with blobstore.open_model("m", store=store) as model:
        assert len(model) == 40


def change_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return act


def remove_shard(folder: Path) -> None:
    (folder / TWO).unlink()


def hold_a_tensor_twice(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / TWO).write_bytes((folder / ONE).read_bytes())


def add_single_file(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "model.safetensors").write_bytes(safetensors_bytes(small_tensors()))


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (change_index(lambda places: places.pop("lm_head.weight")), CorruptDataError, "'lm_head"),
        (change_index(lambda places: places.update(ghost=ONE)), CorruptDataError, "'ghost'"),
        (remove_shard, NotFoundError, TWO),
        (hold_a_tensor_twice, CorruptDataError, "both hold"),
        (add_single_file, UnsupportedSourceError, "both model.safetensors"),
    ],
)
def test_an_index_and_shards_that_disagree(
    store: Store,
    tmp_path: Path,
    change: Callable[[Path], None],
    kind: type[BlobStoreError],
    says: str,
) -> None:
    change(write_shards(tmp_path / "m"))
    with pytest.raises(kind, match=says):
        blobstore.import_model(tmp_path / "m", store=store)
    assert not store.root.exists()
