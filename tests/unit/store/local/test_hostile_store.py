"""A hostile store: links, pipes, sockets and odd names give a typed error at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stores import blob_path, commit_model, descriptor, manifest_path

import blobstore
from blobstore.errors import (
    NotFoundError,
    StorageError,
)
from blobstore.formats.documents import Manifest
from blobstore.names import ModelName
from blobstore.store.local.store import Store

M = ModelName.parse("m")
DATA = b"\x08\0\0\0\0\0\0\0{}      "


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with the model ``m`` of one blob without tensors."""
    commit_model(store, "m", DATA)
    return store


def _link(path: Path) -> None:
    outside = path.parents[1] / "outside"
    outside.write_bytes(DATA)
    path.symlink_to(outside)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


SPECIAL_FILES = pytest.mark.parametrize("make", [_link, os.mkfifo, _device])


@SPECIAL_FILES
def test_a_blob_that_is_no_regular_file(filled: Store, make: Callable[[Path], None]) -> None:
    path = blob_path(filled, DATA)
    path.unlink()
    make(path)
    wanted = descriptor(DATA)
    for use in (filled.blobs.open, filled.blobs.read, filled.blobs.check):
        with pytest.raises(StorageError) as caught:
            use(wanted)
        assert caught.value.blob == str(wanted.digest)
        assert str(wanted.digest).split(":")[1] in caught.value.message
    assert not filled.blobs.has(wanted.digest, wanted.size)
    with pytest.raises(StorageError):
        blobstore.open_model("m", store=filled)


@SPECIAL_FILES
def test_a_manifest_that_is_no_regular_file(filled: Store, make: Callable[[Path], None]) -> None:
    path = manifest_path(filled, "m")
    path.unlink()
    make(path)
    with pytest.raises(StorageError) as caught:
        filled.manifest(M)
    assert caught.value.model == "m:latest"
    assert [name for name, found in filled.models() if isinstance(found, Manifest)] == []


@SPECIAL_FILES
def test_a_copy_of_a_manifest_whose_place_is_taken_hinders_no_removal(
    filled: Store, make: Callable[[Path], None]
) -> None:
    place = (
        filled.root
        / ".blobstore/copies"
        / manifest_path(filled, "m").relative_to(filled.root / "manifests")
    )
    (copy,) = place.iterdir()
    copy.unlink()
    place.rmdir()
    make(place)
    filled.remove(M)
    assert not manifest_path(filled, "m").exists()


def test_a_linked_manifest_is_replaced_and_what_it_points_to_stays(
    filled: Store, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    manifest_path(filled, "m").unlink()
    manifest_path(filled, "m").symlink_to(outside)
    commit_model(filled, "m", b"new")
    assert outside.read_bytes() == b"mine"
    assert filled.manifest(M).layers[0].size == 3


def test_a_linked_folder_of_manifests_is_refused(filled: Store, tmp_path: Path) -> None:
    level = 2
    folder = filled.root.joinpath("manifests", *M.path_parts[:level])
    outside = tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    raw = outside.joinpath(*M.path_parts[level:]).read_bytes()
    for use in (
        filled.manifest,
        filled.remove,
        lambda name: commit_model(filled, str(name), b"other"),
    ):
        with pytest.raises(StorageError, match="symbolic link"):
            use(M)
    with pytest.raises(StorageError, match="symbolic link"):
        filled.copy(M, ModelName.parse("n"))
    assert list(filled.models()) == []
    assert outside.joinpath(*M.path_parts[level:]).read_bytes() == raw
    assert len([path for path in outside.rglob("*") if path.is_file()]) == 1


def test_a_folder_in_the_place_of_a_blob_or_a_manifest_is_not_written_over(filled: Store) -> None:
    blob_path(filled, b"new").mkdir()
    with pytest.raises(StorageError):
        commit_model(filled, "n", b"new")
    manifest_path(filled, "x").mkdir(parents=True)
    with pytest.raises(StorageError):
        commit_model(filled, "x", b"other")
    with pytest.raises(NotFoundError):
        filled.manifest(ModelName.parse("n"))


def test_a_linked_lock_is_refused(filled: Store, tmp_path: Path) -> None:
    (filled.root / ".blobstore/lock").unlink()
    (filled.root / ".blobstore/lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        commit_model(filled, "n", b"new")
    assert not (tmp_path / "elsewhere").exists()
