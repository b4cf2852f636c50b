"""prune: what no manifest needs goes to the trash and comes back; everything else stays."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stores import blob_path, commit_model, layer_by_hand, link_by_hand, meanwhile

from blobstore.errors import NotFoundError, StorageError, UsageError
from blobstore.inspection.listing import list_models
from blobstore.store.care.prune import DAY_S, prune, undo_prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store

Snapshot = Callable[[Store], dict[str, str]]


def aged(store: Store, data: bytes, age_s: float = 2 * DAY_S) -> Path:
    """Write a blob that no manifest names and that is so old; return its path."""
    layer_by_hand(store, "x", data)
    path = blob_path(store, data)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def contents(store: Store) -> set[bytes]:
    return {path.read_bytes() for path in (store.root / "blobs").iterdir()}


def trashed(store: Store) -> list[bytes]:
    return sorted(path.read_bytes() for path in store.root.glob(".blobstore/trash/*/*"))


def test_what_no_manifest_names_goes_to_the_trash_and_comes_back(store: Store) -> None:
    commit_model(store, "m", b"one", b"two")
    path = aged(store, b"orphan")
    result = prune(store)
    assert [(blob.path, blob.size) for blob in result.removed] == [(path, 6)]
    assert contents(store) == {b"one", b"two"}
    assert trashed(store) == [b"orphan"]
    assert [nbytes for _, nbytes in undo_prune(store).restored] == [6]
    assert contents(store) == {b"one", b"two", b"orphan"}
    assert path.stat().st_mtime > time.time() - DAY_S  # a starting Ollama spares it
    assert not list(store.root.glob(".blobstore/trash/*"))


def test_the_next_prune_empties_the_trash_in_any_case(store: Store, snapshot: Snapshot) -> None:
    commit_model(store, "m", b"one")
    aged(store, b"first")
    assert prune(store).freed == 0
    aged(store, b"later!")
    before = snapshot(store)
    shown = prune(store, dry_run=True)
    assert snapshot(store) == before
    done = prune(store)
    assert shown.freed == done.freed == len(b"first")
    assert [blob.size for blob in shown.removed] == [len(b"later!")]
    assert trashed(store) == [b"later!"]
    assert prune(store).freed == len(b"later!")
    with pytest.raises(NotFoundError, match="empty"):
        undo_prune(store)


def test_young_blobs_are_spared(store: Store) -> None:
    commit_model(store, "m", b"one")
    aged(store, b"young", 2 * 3600)
    result = prune(store)
    assert (result.removed, [blob.size for blob in result.spared]) == ((), [5])
    for grace_s in (3599, float("nan")):  # less needs a sole owner
        with pytest.raises(UsageError):
            prune(store, grace_s=grace_s)
    assert [blob.size for blob in prune(store, grace_s=3600).removed] == [5]


def test_a_manifest_that_appears_before_the_lock_is_had_saves_its_blobs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision that counts is the one of the lock's holder."""
    commit_model(store, "m", b"one")
    path = aged(store, b"two")

    def link() -> None:
        link_by_hand(store, "n", {"x": b"two"})
        os.utime(path, (0, 0))

    meanwhile(monkeypatch, "open", store.root / ".blobstore/lock", link)
    assert prune(store).removed == ()
    assert contents(store) == {b"one", b"two"}


def test_what_is_no_blob_of_ours_stays(store: Store, tmp_path: Path) -> None:
    commit_model(store, "m", b"one")
    aged(store, b"orphan")
    odd: dict[str, Callable[[Path], object]] = {
        "sha256-" + "a" * 64 + "-partial-0": Path.touch,  # an Ollama pulls it
        "notes.txt": Path.touch,
        "sha256-" + "b" * 64: lambda path: path.symlink_to(tmp_path),
        "sha256-" + "c" * 64: os.mkfifo,
        "sha256-" + "d" * 64: Path.mkdir,
        "sha256-" + "E" * 64: Path.touch,
    }
    for name, make in odd.items():
        make(store.root / "blobs" / name)
    (store.root / ".blobstore/tmp/foreign").mkdir(parents=True)
    result = prune(store, grace_s=0, sole_owner=True)
    assert [blob.size for blob in result.removed] == [6]
    left = {path.name for path in (store.root / "blobs").iterdir()}
    assert left == {*odd, blob_path(store, b"one").name}
    assert (store.root / ".blobstore/tmp/foreign").is_dir()


def test_undo_never_replaces_what_the_store_has_again(store: Store) -> None:
    for data in (b"back", b"damaged", b"cut", b"gone"):
        aged(store, data)
    prune(store, forget=True)
    blob_path(store, b"back").write_bytes(b"newe")  # of the right size: it may be read just now
    blob_path(store, b"damaged").write_bytes(b"short")
    in_trash = {path.read_bytes(): path for path in store.root.glob(".blobstore/trash/*/*")}
    in_trash[b"cut"].write_bytes(b"c")
    undone = undo_prune(store)
    assert sorted(nbytes for _, nbytes in undone.restored) == [4, 7]
    assert sorted(nbytes for _, nbytes in undone.kept) == [3, 4]
    assert contents(store) == {b"newe", b"damaged", b"gone"}
    assert trashed(store) == [b"back", b"c"]


def test_a_prune_that_was_killed_half_way_can_be_undone_or_repeated(store: Store) -> None:
    """What is in the trash already comes back, or goes with the next clean-up."""
    for data in (b"a", b"b", b"c"):
        aged(store, data)
    store.trash.take([blob_path(store, b"a")])  # as far as it came
    assert len(undo_prune(store).restored) == 1
    assert contents(store) == {b"a", b"b", b"c"}
    os.utime(blob_path(store, b"a"), (0, 0))
    store.trash.take([blob_path(store, b"a")])
    store.trash.take([blob_path(store, b"b")])
    result = prune(store, forget=True)
    assert (len(result.removed), result.freed) == (1, 2)
    assert trashed(store) == [b"c"]
    assert len(list(store.root.glob(".blobstore/trash/*"))) == 1


def test_manifests_on_a_missing_disk_are_not_taken_for_none(store: Store, tmp_path: Path) -> None:
    commit_model(store, "m", b"one")
    (store.root / "manifests").rename(tmp_path / "disk")
    (store.root / "manifests").symlink_to(tmp_path / "disk")
    assert prune(store, grace_s=0, sole_owner=True).removed == ()
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    for look in (prune, verify, measure_usage, list_models):
        with pytest.raises(StorageError, match="symbolic link"):
            look(store)
    assert contents(store) == {b"one"}
