"""Store: what lies where and with which mode.

A session shows nothing before it publishes, and nothing after an error.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.stores import (
    blob_path,
    commit_model,
    manifest_path,
)

from blobstore.errors import (
    DocumentError,
    NotFoundError,
    StorageError,
)
from blobstore.formats.documents import Manifest
from blobstore.io import durable
from blobstore.names import ModelName
from blobstore.store.local import manifests
from blobstore.store.local.manifests import ManifestFolder
from blobstore.store.local.store import Store, open_store

Snapshot = Callable[[Store], dict[str, str]]
NAME = ModelName.parse("m")


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_a_model_lies_in_ollamas_folders_and_everything_else_in_ours(store: Store) -> None:
    copy = commit_model(store, "example.org:8080/team/model:tag", b"one", b"two").digest.hex
    assert files(store.root) == sorted(
        [
            f".blobstore/copies/example.org:8080/team/model/tag/{copy}",
            ".blobstore/lock",
            ".blobstore/names",
            "blobs/sha256-7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed",
            "blobs/sha256-3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3",
            "manifests/example.org:8080/team/model/tag",
        ]
    )


def test_the_manifest_is_one_line_in_ollamas_key_order(store: Store) -> None:
    commit_model(store, "m", b"one")
    digest = "sha256:7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    assert manifest_path(store, "m").read_bytes() == (
        b'{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json","layers":[{"mediaType":'
        b'"application/vnd.ollama.image.tensor","digest":"%s","size":3,"name":"layer0"}]}\n'
        % digest.encode()
    )


def test_reading_creates_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "none")
    assert list(store.models()) == []
    with pytest.raises(NotFoundError):
        store.manifest(NAME)
    assert list(tmp_path.iterdir()) == []


def test_the_default_root_is_ollamas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store().root == tmp_path / ".ollama" / "models"
    assert open_store("~/elsewhere").root == tmp_path / "elsewhere"


def test_an_ingest_that_fails_leaves_nothing(store: Store, snapshot: Snapshot) -> None:
    commit_model(store, "old", b"one")
    before = snapshot(store)

    def fail() -> None:
        with store.session() as session:
            session.put(b"two")
            with closing(session.writer(100, lambda _: None)) as writer:
                writer.put(0, b"three")
            raise SystemExit("in the middle")

    with pytest.raises(SystemExit):
        fail()
    assert snapshot(store) == before
    assert list((store.root / ".blobstore/tmp").iterdir()) == []


@pytest.mark.parametrize("damaged", [b"on", b"eno"])
def test_a_commit_heals_a_damaged_blob(store: Store, damaged: bytes) -> None:
    commit_model(store, "m", b"one")
    blob_path(store, b"one").write_bytes(damaged)
    commit_model(store, "m", b"one")
    assert blob_path(store, b"one").read_bytes() == b"one"


def test_a_commit_replaces_a_link_that_lies_where_a_blob_goes(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"eno")
    blob_path(store, b"one").parent.mkdir(parents=True)
    blob_path(store, b"one").symlink_to(outside)
    commit_model(store, "m", b"one")
    assert not blob_path(store, b"one").is_symlink()
    assert outside.read_bytes() == b"eno"


@pytest.mark.parametrize("older", [b"older", None])
def test_a_manifest_whose_name_can_not_be_made_durable_is_taken_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, older: bytes | None
) -> None:
    commit_model(store, "m:other", b"one")
    if older is not None:
        commit_model(store, "m", older)
    real = durable.sync_folder

    def sync_folder(path: Path) -> None:
        if path == manifest_path(store, "m").parent:
            raise OSError(errno.EIO, "input/output error")
        real(path)

    monkeypatch.setattr(manifests, "sync_folder", sync_folder)
    with pytest.raises(StorageError, match="input/output error"):
        commit_model(store, "m", b"two")
    found = {
        str(name): manifest.layers[0].size
        for name, manifest in store.models()
        if isinstance(manifest, Manifest)
    }
    assert found == {"m:other": 3} | ({"m:latest": 5} if older is not None else {})
    assert len(store.copies.of(NAME)) == (older is not None)


@pytest.mark.parametrize("broken", [b"", b'{"schemaVersion":1,"layers":[]}'])
def test_a_broken_manifest_is_listed_with_its_error_beside_the_others(
    store: Store, broken: bytes
) -> None:
    for name in ("a", "b", "c"):
        commit_model(store, name, name.encode())
    manifest_path(store, "b").write_bytes(broken)
    listed = list(store.models())
    assert [str(name) for name, _ in listed] == ["a:latest", "b:latest", "c:latest"]
    assert [type(found) for _, found in listed] == [Manifest, DocumentError, Manifest]
    error = listed[1][1]
    assert isinstance(error, DocumentError)
    assert error.model == "b:latest"
    assert "b:latest" in error.message


def test_files_at_another_depth_or_with_odd_names_are_no_models(store: Store) -> None:
    commit_model(store, "a", b"a")
    raw = manifest_path(store, "a").read_bytes()
    folder = manifest_path(store, "a").parent
    for path in (
        "x",
        "../x",
        "../../x",
        "../../../x",
        "deep/x",
        ".hidden",
        "with space",
        "tab\t",
        "é",
        "-x",
        "x~",
    ):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(raw)
    assert [str(name) for name, _ in store.models()] == ["a:latest", "a:x"]


def test_a_file_system_that_can_not_sync_folders_is_synced_as_a_whole(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = os.fsync, list[int]()

    def fsync(fd: int) -> None:
        if Path(f"/dev/fd/{fd}").is_dir():
            raise OSError(errno.EINVAL, "invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("blobstore.io.durable.sync_file_system", synced.append)
    commit_model(store, "m", b"one")
    assert [str(name) for name, _ in store.models()] == ["m:latest"]
    assert len(synced) >= 3  # at least blobs/, and both ends of the manifest's way


def test_a_move_whose_old_manifest_can_not_be_read_is_an_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_model(store, "m", b"one")
    read = ManifestFolder.text
    moved = ModelName.parse("n")

    def fail(folder: ManifestFolder, name: ModelName) -> bytes:
        if name != moved and folder.has(moved):
            raise StorageError("can't read the manifest: input/output error")
        return read(folder, name)

    monkeypatch.setattr(ManifestFolder, "text", fail)
    with pytest.raises(StorageError, match="input/output error"):
        store.move("m", "n")
    monkeypatch.undo()
    assert [str(name) for name, _ in store.models()] == ["m:latest", "n:latest"]
