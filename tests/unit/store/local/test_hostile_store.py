"""Damaged and foreign stores, as of the corpus (fixtures/corpus): typed errors at once.

What is not ours is reported, never followed, never removed. Other states: test_own_files.py,
test_leftovers.py, care/, tests/faults.
"""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import safetensors_bytes
from support.stores import blob_path, commit_model, descriptor, layer_by_hand, manifest_path

import blobstore
from blobstore.errors import StorageError
from blobstore.formats.documents import Manifest
from blobstore.names import ModelName
from blobstore.store.care.prune import prune
from blobstore.store.care.verify import verify
from blobstore.store.local import store_folder
from blobstore.store.local.store import Store, open_store

M = ModelName.parse("m")
BLOB = safetensors_bytes({"t": np.arange(9.0)})
ORPHAN = b"a blob that nobody needs"


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with the model ``m`` of one blob, and a blob that nobody needs and that is old."""
    commit_model(store, "m", BLOB)
    layer_by_hand(store, "", ORPHAN)
    os.utime(blob_path(store, ORPHAN), (0, 0))
    return store


def link(path: Path) -> None:
    outside = path.parents[1] / "outside"
    outside.write_bytes(BLOB)
    path.symlink_to(outside)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # a socket's address holds 107 bytes
        server.bind(path.name)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


NO_FILES = pytest.mark.parametrize("make", [link, os.mkfifo, bind, link_to_device])


@NO_FILES
def test_a_blob_that_is_no_regular_file(filled: Store, make: Callable[[Path], None]) -> None:
    path = blob_path(filled, BLOB)
    path.unlink()
    make(path)
    before, wanted = path.lstat(), descriptor(BLOB)
    for use in (
        lambda: filled.blobs.open(wanted),
        lambda: filled.blobs.read(wanted),
        lambda: filled.blobs.check(wanted),
        lambda: blobstore.open_model("m", store=filled, verify=True),
    ):
        with pytest.raises(StorageError) as caught:
            use()
        assert caught.value.blob == str(wanted.digest)
        assert wanted.digest.hex in caught.value.message
    assert not filled.blobs.has(wanted.digest, wanted.size)
    assert [blob.models for blob in verify(filled).damaged] == [(M,)]
    filled.manifests.remove(M)
    assert [blob.models for blob in verify(filled).damaged] == [()]
    prune(filled, grace_s=0, sole_owner=True, forget=True)
    assert path.lstat() == before


@NO_FILES
def test_a_manifest_that_is_no_regular_file(filled: Store, make: Callable[[Path], None]) -> None:
    path = manifest_path(filled, "m")
    path.unlink()
    make(path)
    with pytest.raises(StorageError) as caught:
        filled.manifest(M)
    assert caught.value.model == "m:latest"
    assert [name for name, found in filled.models() if isinstance(found, Manifest)] == []


def test_a_linked_manifest_is_replaced_and_its_target_stays(filled: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    manifest_path(filled, "m").unlink()
    manifest_path(filled, "m").symlink_to(outside)
    commit_model(filled, "m", b"new")
    assert outside.read_bytes() == b"mine"
    assert filled.manifest(M).layers[0].size == 3


def test_a_linked_folder_of_manifests_is_refused(filled: Store, tmp_path: Path) -> None:
    folder, outside = manifest_path(filled, "m").parents[1], tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    for use in (
        lambda: filled.manifest(M),
        lambda: filled.remove(M),
        lambda: filled.copy(M, "n"),
        lambda: commit_model(filled, "m", b"other"),
    ):
        with pytest.raises(StorageError, match="symbolic link"):
            use()
    assert list(filled.models()) == []
    assert [path for path in outside.rglob("*") if path.is_file()] == [outside / "m" / "latest"]


def test_a_network_clean_up_needs_a_sole_owner(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This file system is taken for a remote one: there is no server here."""
    monkeypatch.setattr(store_folder, "is_remote", lambda _folder: True)
    with pytest.raises(StorageError, match="network file system") as caught:
        prune(filled)
    assert "sole_owner" in str(caught.value.hint)
    assert len(prune(filled, sole_owner=True).removed) == 1


def test_a_clock_that_was_set_back_makes_no_blob_old(filled: Store) -> None:
    for path in (filled.root / "blobs").iterdir():
        os.utime(path, (time.time() + 2 * 365 * 86_400,) * 2)
    assert prune(filled, grace_s=0, sole_owner=True).removed == ()
    assert verify(filled).is_sound


@pytest.mark.parametrize("mask", [0, 0o077])
def test_files_are_written_with_the_users_umask(store: Store, mask: int) -> None:
    before = os.umask(mask)
    try:
        commit_model(store, "m", BLOB)
    finally:
        os.umask(before)
    modes = {path.is_dir(): path.stat().st_mode & 0o7777 for path in store.root.rglob("*")}
    assert modes == {False: 0o644 & ~mask, True: 0o755 & ~mask}
    assert verify(store).odd == ()


def test_blobs_on_another_disk_named_by_an_old_ollama(filled: Store, tmp_path: Path) -> None:
    for path in list(filled.blobs.path.iterdir()):
        path.rename(path.with_name(path.name.replace("-", ":")))
    (filled.root / "blobs").rename(tmp_path / "elsewhere")
    (filled.root / "blobs").symlink_to(tmp_path / "elsewhere")
    store = open_store(filled.root)
    assert verify(store).is_sound
    assert [blob.size for blob in prune(store).removed] == [len(ORPHAN)]
    assert set(blobstore.open_model("m", store=store, verify=True)) == {"t"}
    store.remove(M)
    assert list((tmp_path / "elsewhere").iterdir()) == []
