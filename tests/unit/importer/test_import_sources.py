"""Bad sources: cut short, changed under the import, links, pipes, partial downloads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
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
from blobstore.importer.run import default_name, run_plan
from blobstore.store.local.store import Store

Snapshot = Callable[[Store], dict[str, str]]
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
        (folder / INDEX).write_text(
            json.dumps({"metadata": {"total_size": 1}, "weight_map": shards})
        )
    return folder


def expect_everything(store: Store, source: Path) -> None:
    blobstore.import_model(source, "m", store=store)
    with blobstore.open_model("m", store=store, verify=True) as model:
        assert {name: bits(tensor.numpy()) for name, tensor in model.items()} == {
            name: bits(array) for name, array in small_tensors().items()
        }


def test_a_folder_with_one_file(store: Store, tmp_path: Path) -> None:
    expect_everything(store, write_checkpoint(tmp_path / "m"))


def test_a_bare_file(store: Store, tmp_path: Path) -> None:
    expect_everything(store, write_checkpoint(tmp_path / "m") / "model.safetensors")
    with blobstore.open_model("m", store=store) as model:
        assert (model.documents(), model.config.capabilities) == (["blobstore.json"], [])


@pytest.mark.parametrize("index", [True, False])
def test_a_folder_with_shards(store: Store, tmp_path: Path, index: bool) -> None:
    expect_everything(store, write_shards(tmp_path / "m", index=index))
    with blobstore.open_model("m", store=store) as model:
        assert model.documents() == ["config.json", "blobstore.json"]
        assert model.files() == ["config.json", *([INDEX] if index else [])]


def test_other_weights_are_left_out_and_said(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    (source / "consolidated.safetensors").write_bytes(safetensors_bytes({"other": normal("o", 3)}))
    (source / "broken.safetensors").write_bytes(b"?")
    left_out = blobstore.plan_import(source).coverage.left_out
    assert [one.name for one in left_out] == ["broken.safetensors", "consolidated.safetensors"]
    assert {one.reason for one in left_out} == {"safetensors that are not part of the checkpoint"}
    expect_everything(store, source)


def test_a_source_that_is_reached_through_links(store: Store, tmp_path: Path) -> None:
    """The cache of Hugging Face: a snapshot's files are links to files named for their hash."""
    real, snapshot = write_shards(tmp_path / "real"), tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(real.iterdir())):
        blob = tmp_path / f"blob{number}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    (tmp_path / "link").symlink_to(snapshot)
    expect_everything(store, tmp_path / "link")
    (tmp_path / "file.safetensors").symlink_to(snapshot / TWO)
    blobstore.import_model(tmp_path / "file.safetensors", store=store)
    assert list(blobstore.open_model("file", store=store)) == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("gone")], ids=["fifo", "dangling"]
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX, TWO])
@pytest.mark.parametrize("index", [True, False])
def test_a_file_of_the_checkpoint_that_can_not_be_read_is_not_left_out(
    store: Store, tmp_path: Path, name: str, make: Callable[[Path], None], index: bool
) -> None:
    """A partial download is a folder with dangling links, which belong to the model."""
    source = write_shards(tmp_path / "m", index=index)
    (source / name).unlink(missing_ok=True)
    make(source / name)
    with pytest.raises((NotFoundError, StorageError)) as caught:
        blobstore.import_model(source, store=store)
    assert name in caught.value.message
    assert not store.root.exists()


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, lambda path: path.symlink_to("gone"), lambda path: path.symlink_to("/dev/zero")],
)
def test_a_source_that_is_no_regular_file_is_an_error_at_once(
    store: Store, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    make(folder / "model.safetensors")
    for source in (folder, folder / "model.safetensors"):
        with pytest.raises((NotFoundError, StorageError)) as caught:
            blobstore.import_model(source, "m", store=store)
        assert "model.safetensors" in caught.value.message
    assert not store.root.exists()


def test_nothing_there(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        blobstore.import_model(tmp_path / "nowhere", store=store)


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_a_file_that_is_cut_short(store: Store, tmp_path: Path, kept: int) -> None:
    path = write_checkpoint(tmp_path / "m") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CorruptDataError) as caught:
        blobstore.import_model(tmp_path / "m", store=store)
    assert caught.value.path == str(path)
    assert not store.root.exists()


def test_a_pointer_of_git_lfs_is_called_that(store: Store, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m") / "model.safetensors"
    path.write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n"
    )
    with pytest.raises(CorruptDataError, match="git-lfs"):
        blobstore.import_model(tmp_path / "m", store=store)


BIG = {"a.weight": np.zeros((3000, 1024), np.float32), "b.weight": normal("b", 64, 64)}


def _truncate(path: Path) -> None:
    os.truncate(path, 6_000_000)


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def _write_into(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\1")


@pytest.mark.parametrize("change", [_truncate, _replace, _write_into, _append, Path.unlink])
@pytest.mark.parametrize("when", ["first chunk", "last chunk"])
@pytest.mark.parametrize("jobs", [1, 4])
def test_a_source_that_changes_under_the_import(
    store: Store,
    tmp_path: Path,
    snapshot: Snapshot,
    change: Callable[[Path], None],
    when: str,
    jobs: int,
) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "old"), store=store)
    before = snapshot(store)
    path = write_checkpoint(tmp_path / "m", BIG) / "model.safetensors"
    os.utime(path, (1, 1))
    done = 0

    def progress(nbytes: int, blob: str) -> None:
        nonlocal done
        if nbytes == 0:  # a header is told of too, and has no source bytes
            return
        first, done = done == 0, done + nbytes
        if first if when == "first chunk" else done == sum(array.nbytes for array in BIG.values()):
            change(path)

    with pytest.raises((CorruptDataError, NotFoundError)) as caught:
        blobstore.import_model(tmp_path / "m", store=store, jobs=jobs, progress=progress)
    assert caught.value.path == str(path)
    assert str(path) in caught.value.message
    assert snapshot(store) == before
    assert list((store.root / ".blobstore/tmp").iterdir()) == []


@pytest.mark.parametrize("change", [_replace, _append, Path.unlink])
def test_a_shard_that_changes_before_it_is_opened(
    store: Store, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path = write_shards(tmp_path / "m") / ONE
    os.utime(path, (1, 1))
    plan = blobstore.plan_import(tmp_path / "m")
    change(path)
    with pytest.raises((CorruptDataError, NotFoundError)) as caught:
        run_plan(plan, default_name(plan), store)
    assert caught.value.path == str(path)
    assert list(store.models()) == []


def _drop_from_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["lm_head.weight"]
    (folder / INDEX).write_text(json.dumps(index))


def _add_to_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost.weight"] = ONE
    (folder / INDEX).write_text(json.dumps(index))


def _swap_in_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = TWO
    (folder / INDEX).write_text(json.dumps(index))


def _remove_shard(folder: Path) -> None:
    (folder / TWO).unlink()


def _hold_a_tensor_twice(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / TWO).write_bytes((folder / ONE).read_bytes())


def _add_single_file(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "model.safetensors").write_bytes(safetensors_bytes(small_tensors()))


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (_drop_from_index, CorruptDataError, "'lm_head.weight'"),
        (_add_to_index, CorruptDataError, "'ghost.weight'"),
        (_swap_in_index, CorruptDataError, "'lm_head.weight'"),
        (_remove_shard, NotFoundError, TWO),
        (_hold_a_tensor_twice, CorruptDataError, "both hold the tensor"),
        (_add_single_file, UnsupportedSourceError, "both model.safetensors and"),
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
