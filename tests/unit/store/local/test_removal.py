"""cp, mv and rm: names share blobs; a removal deletes only blobs that nobody can need."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.stores import blob_path, commit_model, layer_by_hand, manifest_path

from blobstore.errors import BlobStoreError, DocumentError, NotFoundError, StorageError
from blobstore.store.care.prune import prune
from blobstore.store.local.store import Store, open_store

Snapshot = Callable[[Store], dict[str, str]]


def blobs(store: Store) -> set[bytes]:
    return {path.read_bytes() for path in (store.root / "blobs").iterdir()}


def names(store: Store) -> list[str]:
    return [str(name) for name, _ in store.models()]


def test_cp_of_a_missing_broken_or_incomplete_model(store: Store, snapshot: Snapshot) -> None:
    commit_model(store, "broken", b"two")
    manifest_path(store, "broken").write_bytes(b"{")
    commit_model(store, "incomplete", b"three")
    blob_path(store, b"three").unlink()
    before = snapshot(store)
    sources = {"missing": NotFoundError, "broken": DocumentError, "incomplete": NotFoundError}
    for source, error in sources.items():
        with pytest.raises(error):
            store.copy(source, "n")
    assert snapshot(store) == before


def test_mv_gives_a_model_another_name(store: Store) -> None:
    commit_model(store, "example.org/team/m", b"one")
    raw = manifest_path(store, "example.org/team/m").read_bytes()
    store.move("example.org/team/m", "n")
    store.move("n", "n")
    assert manifest_path(store, "n").read_bytes() == raw
    assert names(store) == ["n:latest"]
    assert not (store.root / "manifests/example.org").exists()


def test_rm_deletes_the_model_and_its_blobs_and_the_empty_folders(store: Store) -> None:
    commit_model(store, "example.org/team/m", b"one", b"two", b"one")
    commit_model(store, "n", b"two", b"three")
    removal = store.remove("example.org/team/m")
    assert [blob.size for blob in removal.removed] == [3]
    assert (removal.kept, removal.reason) == ((), None)
    assert blobs(store) == {b"two", b"three"}
    assert len(store.remove("n").removed) == 2
    assert blobs(store) == set()
    assert list((store.root / "manifests").iterdir()) == []


def test_a_broken_manifest_can_be_removed_and_takes_no_blob_along(store: Store) -> None:
    commit_model(store, "m", b"one")
    manifest_path(store, "m").write_bytes(b"{")
    assert store.remove("m").removed == ()
    assert names(store) == []
    assert blobs(store) == {b"one"}


def test_the_manifest_goes_before_the_blobs(store: Store) -> None:
    commit_model(store, "m", b"one", b"two")
    blob_path(store, b"one").unlink()
    blob_path(store, b"one").mkdir()
    with pytest.raises(StorageError):
        store.remove("m")
    assert not manifest_path(store, "m").exists()


def broken_manifest(path: Path) -> None:
    path.write_bytes(b"{")


def odd_name(path: Path) -> None:
    path.with_name("latest~").write_bytes(b"may be an older Ollama's")


def link(path: Path) -> None:
    path.symlink_to("/nowhere")


def linked_folder(path: Path) -> None:
    """Link the folder of manifests to another, which has the model ``m`` again."""
    outside = path.parents[4] / "outside"
    outside.mkdir()
    model = path.parent.with_name("m") / "latest"
    (outside / "latest").write_bytes(model.read_bytes())
    path.parent.rmdir()
    path.parent.symlink_to(outside)


@pytest.mark.parametrize("obstacle", [broken_manifest, odd_name, link, linked_folder])
def test_blobs_stay_while_something_that_may_need_them_can_not_be_read(
    store: Store, obstacle: Callable[[Path], object]
) -> None:
    """In the tree of newer manifests: test_newer.py."""
    commit_model(store, "m", b"one", b"two")
    layer_by_hand(store, "", b"orphan")
    path = manifest_path(store, "other")
    path.parent.mkdir()
    obstacle(path)
    for dry_run in (True, False):
        with pytest.raises(BlobStoreError, match=r"nothing is removed: .*other") as caught:
            prune(store, grace_s=0, sole_owner=True, dry_run=dry_run)
        assert caught.value.hint
    removal = store.remove("m")
    assert not manifest_path(store, "m").exists()
    assert blobs(store) == {b"one", b"two", b"orphan"}
    assert (removal.removed, len(removal.kept)) == ((), 2)
    assert "other" in (removal.reason or "")
    assert path.parent.is_symlink() or any(path.parent.iterdir())


def test_blobs_stay_while_another_holds_the_store(store: Store) -> None:
    commit_model(store, "m", b"one")
    with store.session():
        removal = open_store(store.root, wait_s=0).remove("m")
    assert (removal.removed, len(removal.kept)) == ((), 1)
    assert "in use" in (removal.reason or "")
    assert names(store) == []
    assert blobs(store) == {b"one"}
