"""Store: what lies where; a session shows nothing before it publishes, and nothing after an error.

Publishing heals what is damaged, and refuses what is not whole.
"""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.stores import blob_path, commit_model, descriptor, manifest_path

from blobstore.errors import CorruptDataError, StorageError
from blobstore.formats.documents import Manifest
from blobstore.names import ModelName
from blobstore.store.local.store import Store

Snapshot = Callable[[Store], dict[str, str]]
NAME = ModelName.parse("m")


def test_a_model_lies_in_ollamas_folders_and_everything_else_in_ours(store: Store) -> None:
    copy = commit_model(store, "example.org:8080/team/model:tag", b"one", b"two").digest.hex
    files = (path for path in store.root.rglob("*") if path.is_file())
    assert {path.relative_to(store.root).as_posix() for path in files} == {
        f".blobstore/copies/example.org:8080/team/model/tag/{copy}",
        ".blobstore/lock",
        ".blobstore/names",
        "blobs/sha256-7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed",
        "blobs/sha256-3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3",
        "manifests/example.org:8080/team/model/tag",
    }


def test_an_ingest_that_fails_leaves_nothing(store: Store, snapshot: Snapshot) -> None:
    commit_model(store, "old", b"one")
    before = snapshot(store)
    with pytest.raises(SystemExit), store.session() as session:  # noqa: PT012
        session.put(b"two")
        with closing(session.writer(100, lambda _: None)) as writer:
            writer.put(0, b"three")
        raise SystemExit
    assert snapshot(store) == before
    assert list((store.root / ".blobstore/tmp").iterdir()) == []


@pytest.mark.parametrize("damaged", [b"on", b"eno", None])
def test_a_commit_heals_a_damaged_blob(store: Store, tmp_path: Path, damaged: bytes | None) -> None:
    commit_model(store, "m", b"one")
    path, outside = blob_path(store, b"one"), tmp_path / "outside"
    outside.write_bytes(b"eno")
    if damaged is None:
        path.unlink()
        path.symlink_to(outside)
    else:
        path.write_bytes(damaged)
    commit_model(store, "m", b"one")
    assert path.read_bytes() == b"one"
    assert not path.is_symlink()
    assert outside.read_bytes() == b"eno"


@pytest.mark.parametrize("kind", ["another size", "a folder", "a link"])
def test_what_is_not_a_blob_is_not_published(store: Store, kind: str) -> None:
    path = blob_path(store, b"one")
    path.parent.mkdir(parents=True)
    match kind:
        case "another size":
            path.write_bytes(b"more")
        case "a folder":
            path.mkdir()
        case "a link":
            (store.root / "file").write_bytes(b"one")
            path.symlink_to(store.root / "file")
    with store.session() as session, pytest.raises((CorruptDataError, StorageError)):
        session.publish(NAME, Manifest(layers=(descriptor(b"one"),)))
    assert store.manifests.names() == []


def test_a_large_manifest_of_zeros_is_replaced(store: Store) -> None:
    """As a power cut leaves the manifests of other programs."""
    path = manifest_path(store, "m")
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(2**21))
    assert commit_model(store, "m", b"one").raw == path.read_bytes()


@pytest.mark.parametrize("older", [b"older", None])
def test_a_manifest_whose_name_can_not_be_made_durable_is_taken_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, older: bytes | None
) -> None:
    if older is not None:
        commit_model(store, "m", older)
    folder, real = manifest_path(store, "m").parent, os.fsync

    def fsync(fd: int) -> None:
        if folder.exists() and os.path.samestat(os.fstat(fd), folder.stat()):
            raise OSError(errno.EIO, "input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="input/output error"):
        commit_model(store, "m", b"two")
    assert list(map(str, store.manifests.names())) == (["m:latest"] if older else [])
    assert len(store.copies.of(NAME)) == (older is not None)
    if older:
        assert store.manifest(NAME).layers[0].size == len(older)


def test_a_file_system_that_can_not_sync_folders_is_synced_as_a_whole(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.fsync, list[int]()

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            refused.append(fd)
            raise OSError(errno.EINVAL, "invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    commit_model(store, "m", b"one")
    assert list(map(str, store.manifests.names())) == ["m:latest"]
    assert refused
