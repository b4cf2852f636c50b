"""An unmounted disk: an empty folder does not count as removed models; prune is undone."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import small_tensors, write_checkpoint
from support.stores import blob_path, commit_model, layer_by_hand, manifest_path

import blobstore
from blobstore.errors import StorageError
from blobstore.importer.repair import repair_model
from blobstore.store.care.prune import PruneResult, prune, undo_prune
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store

Snapshot = Callable[[Store], dict[str, str]]
LIBRARY = "manifests/registry.ollama.ai"


def fill(store: Store, *names: str) -> None:
    """Commit a model of each name, with a blob of its own and one that all share; all are old."""
    for name in names:
        commit_model(store, name, name.encode(), b"shared")
    for path in (store.root / "blobs").iterdir():
        os.utime(path, (0, 0))


def unmount(store: Store, folder: str) -> None:
    (store.root / folder).rename(store.root.parent / "unmounted")
    (store.root / folder).mkdir()


def mount(store: Store, folder: str) -> None:
    (store.root / folder).rmdir()
    (store.root.parent / "unmounted").rename(store.root / folder)


def ollama_rm(store: Store, name: str) -> None:
    """Remove a manifest and its own blob, as Ollama does; our copy of the manifest stays."""
    manifest_path(store, name).unlink()
    blob_path(store, name.encode()).unlink()


def prune_all(store: Store, *, forget: bool = False, dry_run: bool = False) -> PruneResult:
    return prune(store, grace_s=0, sole_owner=True, forget=forget, dry_run=dry_run)


def is_refused(store: Store, snapshot: Snapshot, *texts: str) -> None:
    """Neither a prune nor its dry run goes on, and nothing is changed."""
    before = snapshot(store)
    for dry_run in (True, False):
        with pytest.raises(StorageError, match="nothing is removed") as caught:
            prune_all(store, dry_run=dry_run)
        assert caught.value.path is not None
        for text in texts:
            assert text in f"{caught.value}\n{caught.value.hint}"
    assert snapshot(store) == before


def test_an_empty_folder_of_manifests_is_refused_and_all_is_there_when_it_is_mounted(
    store: Store, snapshot: Snapshot
) -> None:
    fill(store, "a", "b")
    unmount(store, "manifests")
    place = str(store.root / "manifests")
    is_refused(store, snapshot, "a:latest", place, "mounted?", "`forget=True`", "blobstore repair")
    mount(store, "manifests")
    assert prune_all(store).removed == ()
    assert [str(name) for name in store.manifests.names()] == ["a:latest", "b:latest"]


def test_more_than_half_is_too_many(store: Store, snapshot: Snapshot) -> None:
    fill(store, *"abcd")
    for name in "ab":
        manifest_path(store, name).unlink()
    assert len(prune_all(store, dry_run=True).removed) == 2
    manifest_path(store, "c").unlink()
    is_refused(store, snapshot, "3 of the 4 models", "a:latest, b:latest, c:latest")


def test_models_that_ollama_removed_are_no_alarm(store: Store) -> None:
    """It deletes the blobs that only they need with their manifests."""
    fill(store, *"ab")
    for name in "ab":
        ollama_rm(store, name)
    blob_path(store, b"shared").unlink()
    assert [str(name) for name in prune_all(store).forgotten] == ["a:latest", "b:latest"]
    assert prune_all(store).forgotten == ()


def test_blobs_on_an_unmounted_disk(store: Store, snapshot: Snapshot, tmp_path: Path) -> None:
    """Blobs of imports are still known when they return, and the trash is not emptied."""
    source = write_checkpoint(tmp_path / "source", small_tensors())
    blobstore.import_model(source, "m", store=store)
    layer_by_hand(store, "", b"orphan")
    os.utime(blob_path(store, b"orphan"), (0, 0))
    prune(store)
    unmount(store, "blobs")
    journal = (store.root / ".blobstore/hints/journal").read_bytes()
    is_refused(store, snapshot, str(store.root / "blobs"), "mounted?")
    assert (store.root / ".blobstore/hints/journal").read_bytes() == journal
    mount(store, "blobs")
    assert prune(store).freed == len(b"orphan")


def test_who_means_it_says_so_and_can_take_it_back(store: Store, tmp_path: Path) -> None:
    """Blobs and copies come back; a repair makes the model seen again without its source."""
    blobstore.import_model(write_checkpoint(tmp_path / "s"), "a", store=store, quant="int4")
    commit_model(store, "b", b"b")
    blobs = {path.name for path in (store.root / "blobs").iterdir()}
    raw = manifest_path(store, "a").read_bytes()
    for name in ("a", "b"):
        manifest_path(store, name).unlink()
    result = prune_all(store, forget=True)
    assert [str(name) for name in result.forgotten] == ["a:latest", "b:latest"]
    assert undo_prune(store).without_manifest == result.forgotten
    assert {path.name for path in (store.root / "blobs").iterdir()} == blobs
    assert repair_model("a", "no longer there", store=store).manifest_restored
    assert manifest_path(store, "a").read_bytes() == raw
    assert verify(store).is_sound


def test_rm_spares_what_a_lost_model_needs(store: Store) -> None:
    fill(store, "a", "example.org/team/b")
    unmount(store, LIBRARY)
    removal = store.remove("example.org/team/b")
    assert [blob.size for blob in removal.removed] == [len(b"example.org/team/b")]
    assert [blob.size for blob in removal.kept] == [len(b"shared")]
    assert "a:latest" in (removal.reason or "")
    mount(store, LIBRARY)
    assert store.blobs.missing(store.manifest("a").descriptors) == []
    ollama_rm(store, "a")
    commit_model(store, "c", b"shared")
    removal = store.remove("c")  # it is no lost model that Ollama removed
    assert (len(removal.removed), removal.reason) == (1, None)
