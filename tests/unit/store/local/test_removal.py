"""cp and rm: a copy shares its blobs.

A removal deletes exactly the blobs that nobody can need, and says what it kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stores import blob_path, commit_model, layer_by_hand, manifest_path

from blobstore.errors import BlobStoreError, DocumentError, NotFoundError, StorageError, UsageError
from blobstore.names import ModelName
from blobstore.store.care.prune import prune
from blobstore.store.local.store import Store, open_store

Snapshot = Callable[[Store], dict[str, str]]
M, N = ModelName.parse("m"), ModelName.parse("n")


def blobs(store: Store) -> set[bytes]:
    return {path.read_bytes() for path in (store.root / "blobs").iterdir()}


def test_cp_keeps_the_bytes_of_a_manifest_that_others_wrote(store: Store) -> None:
    raw = json.dumps(
        {"layers": [layer_by_hand(store, "x", b"x")], "annotations": {"é": 1}, "schemaVersion": 2},
        indent=1,
    )
    manifest_path(store, "m").parent.mkdir(parents=True)
    manifest_path(store, "m").write_text(raw)
    store.copy(M, N)
    assert manifest_path(store, "n").read_text() == raw


def test_cp_replaces_another_model_only_if_asked(store: Store) -> None:
    commit_model(store, "m", b"one")
    commit_model(store, "n", b"two")
    with pytest.raises(UsageError, match="model n:latest already exists"):
        store.copy(M, N)
    store.copy(M, N, replace=True)
    store.copy(M, N)  # the same model is there now
    assert store.manifest(N).layers[0].size == len(b"one")


def test_cp_of_a_missing_a_broken_or_an_incomplete_model_is_refused(
    store: Store, snapshot: Snapshot
) -> None:
    commit_model(store, "m", b"one")
    commit_model(store, "broken", b"two")
    manifest_path(store, "broken").write_bytes(b"{")
    commit_model(store, "incomplete", b"three")
    blob_path(store, b"three").unlink()
    before = snapshot(store)
    for source, error in (
        ("missing", NotFoundError),
        ("broken", DocumentError),
        ("incomplete", NotFoundError),
    ):
        with pytest.raises(error):
            store.copy(ModelName.parse(source), N)
    assert snapshot(store) == before


def test_rm_deletes_the_model_and_its_blobs_and_the_empty_folders(store: Store) -> None:
    commit_model(store, "example.org/team/m", b"one", b"two")
    removal = store.remove(ModelName.parse("example.org/team/m"))
    assert {blob.size for blob in removal.removed} == {3}
    assert len(removal.removed) == 2
    assert (removal.kept, removal.reason) == ((), None)
    assert blobs(store) == set()
    assert list((store.root / "manifests").iterdir()) == []


def test_rm_keeps_blobs_of_other_models_and_removes_a_repeated_one_once(store: Store) -> None:
    commit_model(store, "m", b"one", b"two", b"one", b"two")
    commit_model(store, "n", b"two", b"three")
    removal = store.remove(M)
    assert [blob.size for blob in removal.removed] == [3]
    assert removal.reason is None
    assert blobs(store) == {b"two", b"three"}


def test_a_broken_manifest_can_be_removed_and_takes_no_blob_along(store: Store) -> None:
    commit_model(store, "m", b"one")
    manifest_path(store, "m").write_bytes(b"{")
    removal = store.remove(M)
    assert removal.removed == ()
    assert list(store.models()) == []
    assert blobs(store) == {b"one"}


def test_the_manifest_goes_before_the_blobs(store: Store) -> None:
    commit_model(store, "m", b"one", b"two")
    blob_path(store, b"one").unlink()
    blob_path(store, b"one").mkdir()
    with pytest.raises(StorageError):
        store.remove(M)
    assert not manifest_path(store, "m").exists()


def broken_manifest(store: Store) -> Path:
    """Write a manifest of the model ``other`` that is not JSON; return its path."""
    path = manifest_path(store, "other")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{")
    return path


def stray_file(store: Store) -> Path:
    """Write a file whose name is no model's."""
    path = manifest_path(store, "other").with_name("latest~")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"may be an older Ollama's")
    return path


def linked_manifest(store: Store) -> Path:
    """Make a link where a manifest would lie."""
    path = manifest_path(store, "other")
    path.parent.mkdir(parents=True)
    path.symlink_to("/nowhere")
    return path


def linked_folder(store: Store) -> Path:
    """Link a folder of manifests to one that contains the model ``m`` again."""
    outside = store.root.parent / "outside" / "other"
    outside.mkdir(parents=True)
    (outside / "latest").write_bytes(manifest_path(store, "m").read_bytes())
    path = manifest_path(store, "other").parent
    path.symlink_to(outside)
    return path


def newer_manifests(store: Store) -> Path:
    """Make a link to a missing blob in the tree of manifests that newer Ollamas have."""
    path = store.root / "manifests-v2" / "ollama.com" / "library" / "other" / "latest"
    path.parent.mkdir(parents=True)
    path.symlink_to(f"../../../../blobs/sha256-{'0' * 64}")
    return path


@pytest.mark.parametrize(
    "obstacle", [broken_manifest, stray_file, linked_manifest, linked_folder, newer_manifests]
)
def test_blobs_stay_while_something_that_may_need_them_can_not_be_read(
    store: Store, obstacle: Callable[[Store], Path]
) -> None:
    commit_model(store, "m", b"one", b"two")
    layer_by_hand(store, "", b"orphan")
    path = obstacle(store)
    for dry_run in (True, False):
        with pytest.raises(BlobStoreError, match=r"nothing is removed: .*other") as caught:
            prune(store, grace_s=0, sole_owner=True, dry_run=dry_run)
        assert caught.value.hint
    removal = store.remove(M)
    assert not manifest_path(store, "m").exists()
    assert blobs(store) == {b"one", b"two", b"orphan"}
    assert removal.removed == ()
    assert {blob.size for blob in removal.kept} == {3}
    assert removal.reason is not None
    assert "other" in removal.reason
    assert path.is_symlink() or path.exists()


def test_blobs_stay_while_another_holds_the_store(store: Store) -> None:
    commit_model(store, "m", b"one")
    with store.session():
        removal = open_store(store.root, wait_s=0).remove(M)
    assert removal.removed == ()
    assert len(removal.kept) == 1
    assert removal.reason is not None
    assert removal.reason.startswith("the store is in use by")
    assert list(store.models()) == []
    assert blobs(store) == {b"one"}


def test_mv_gives_a_model_another_name(store: Store) -> None:
    commit_model(store, "example.org/team/m", b"one")
    raw = manifest_path(store, "example.org/team/m").read_bytes()
    store.move(ModelName.parse("example.org/team/m"), N)
    assert manifest_path(store, "n").read_bytes() == raw
    assert [str(name) for name, _ in store.models()] == ["n:latest"]
    assert not (store.root / "manifests/example.org").exists()
    store.move(N, N)
    assert [str(name) for name, _ in store.models()] == ["n:latest"]
