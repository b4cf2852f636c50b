"""Folders and files to import: shards, links, pipes, partial downloads, odd names and shapes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import normal, safetensors_bytes, small_tensors, write_checkpoint

import blobstore
from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    NotFoundError,
    StorageError,
    UnsupportedSourceError,
)
from blobstore.store.local.store import Store


def dangling(path: Path) -> None:
    path.symlink_to("gone")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("config.json", os.mkfifo),
        ("tokenizer.json", dangling),
        ("model.safetensors.index.json", dangling),
    ],
)
def test_a_file_of_the_checkpoint_that_can_not_be_read_is_not_left_out(
    store: Store, tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    """A partial download is a folder with dangling links, which belong to the model."""
    source = write_checkpoint(tmp_path / "m")
    (source / name).unlink(missing_ok=True)
    make(source / name)
    with pytest.raises((NotFoundError, StorageError), match=name):
        blobstore.import_model(source, store=store)
    assert not store.root.exists()


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    data = (source / "model.safetensors").read_bytes()
    for number in (1, 2):
        (source / f"model-0000{number}-of-00002.safetensors").write_bytes(data)
    with pytest.raises(UnsupportedSourceError, match=r"model\.safetensors"):
        blobstore.plan_import(source)
    (source / "model.safetensors").unlink()
    with pytest.raises(CorruptDataError, match="both hold"):
        blobstore.plan_import(source)


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
