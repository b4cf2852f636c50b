"""cp, mv and rm: names share blobs; a removal deletes only blobs that nobody can need."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.newer import PLACE, linked, manifest_of
from support.stores import blob_path, commit_model, layer_by_hand, manifest_path

from blobstore.errors import BlobStoreError, DocumentError, NotFoundError, StorageError
from blobstore.store.care.prune import prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.local.store import Store, open_store

Snapshot = Callable[[Store], dict[str, str]]


def blobs(store: Store) -> set[bytes]:
    return {path.read_bytes() for path in (store.root / "blobs").iterdir()}


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
    assert list(map(str, store.manifests.names())) == ["n:latest"]
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
    assert store.manifests.names() == []
    assert blobs(store) == {b"one"}


def test_the_manifest_goes_before_the_blobs(store: Store) -> None:
    commit_model(store, "m", b"one", b"two")
    blob_path(store, b"one").unlink()
    blob_path(store, b"one").mkdir()
    with pytest.raises(StorageError):
        store.remove("m")
    assert not manifest_path(store, "m").exists()


def broken(store: Store) -> None:
    manifest_path(store, "other").write_bytes(b"{")


def odd_name(store: Store) -> None:
    manifest_path(store, "other").with_name("latest~").write_bytes(b"may be an older Ollama's")


def link(store: Store) -> None:
    manifest_path(store, "other").symlink_to("/nowhere")


def linked_folder(store: Store) -> None:
    """Link the folder of manifests to another, which has the model ``m`` again."""
    folder, outside = manifest_path(store, "other").parent, store.root / "outside"
    outside.mkdir()
    (outside / "latest").write_bytes(manifest_path(store, "m").read_bytes())
    folder.rmdir()
    folder.symlink_to(outside)


def newer(store: Store, place: str = PLACE) -> Path:
    """Link a newer manifest; return its blob."""
    return linked(store, manifest_of(store, b"three", b"four"), place).resolve()


def newer_without_blob(store: Store) -> None:
    newer(store).unlink()


def newer_of_another_store(store: Store) -> None:
    blob = newer(store)
    outside = blob.rename(store.root.parent / blob.name)
    path = store.root / "manifests-v2" / PLACE
    path.unlink()
    path.symlink_to(outside)


def damaged_newer(store: Store) -> None:
    newer(store).write_text(json.dumps(manifest_of(store, b"one")))


def newer_at_another_depth(store: Store) -> None:
    newer(store, "ollama.com/new/latest")


def newer_text(raw: str) -> Callable[[Store], object]:
    def make(store: Store) -> None:
        path = store.root / "manifests-v2" / PLACE
        path.parent.mkdir(parents=True)
        path.write_text(raw)

    return make


@pytest.mark.parametrize(
    ("obstacle", "says"),
    [
        *((make, "other") for make in (broken, odd_name, link, linked_folder)),
        (newer_without_blob, "manifests-v2"),
        (newer_of_another_store, "manifests-v2"),
        (damaged_newer, "manifests-v2"),
        (newer_at_another_depth, "manifests-v2"),
        (newer_text("{"), "manifests-v2"),
        (newer_text('{"manifests": [{"digest": "sha256:../../x"}]}'), "manifests-v2"),
    ],
)
def test_blobs_stay_while_something_that_may_need_them_can_not_be_read(
    store: Store, obstacle: Callable[[Store], object], says: str
) -> None:
    commit_model(store, "m", b"one", b"two")
    layer_by_hand(store, "", b"orphan")
    path = manifest_path(store, "m")
    path.parent.with_name("other").mkdir()
    obstacle(store)
    before, manifests = blobs(store), set(store.root.glob("manifests*/**/*"))
    for dry_run in (True, False):
        with pytest.raises(BlobStoreError, match=rf"nothing is removed: .*{says}") as caught:
            prune(store, grace_s=0, sole_owner=True, dry_run=dry_run)
        assert caught.value.hint
    assert measure_usage(store).reclaimable == 0
    removal = store.remove("m")
    assert (removal.removed, len(removal.kept)) == ((), 2)
    assert says in (removal.reason or "")
    assert blobs(store) == before
    assert manifests - set(store.root.glob("manifests*/**/*")) == {path, path.parent}


def test_blobs_stay_while_another_holds_the_store(store: Store) -> None:
    commit_model(store, "m", b"one")
    with store.session():
        removal = open_store(store.root, wait_s=0).remove("m")
    assert (removal.removed, len(removal.kept)) == ((), 1)
    assert "in use" in (removal.reason or "")
    assert store.manifests.names() == []
    assert blobs(store) == {b"one"}
