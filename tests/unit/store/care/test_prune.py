"""prune: what no manifest needs goes to the trash and comes back; everything else stays."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from support.checkpoints import small_tensors, write_checkpoint
from support.stores import (
    blob_path,
    commit_model,
    layer_by_hand,
    link_by_hand,
    manifest_path,
    meanwhile,
)

import blobstore
from blobstore.errors import CorruptDataError, NotFoundError, StorageError, UsageError
from blobstore.formats.oci import Signature
from blobstore.importer.repair import repair_model
from blobstore.inspection.listing import list_models
from blobstore.names import Digest, ModelName
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
    return {path.read_bytes() for path in store.blobs.path.iterdir()}


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


def test_a_manifest_that_appears_saves_blobs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
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
    left = {path.name for path in store.blobs.path.iterdir()}
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
    paths = [aged(store, data) for data in (b"a", b"b", b"c")]
    store.trash.take(paths[:1])  # as far as it came
    assert len(undo_prune(store).restored) == 1
    assert contents(store) == {b"a", b"b", b"c"}
    store.trash.take(paths[:1])
    store.trash.take(paths[1:2])
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


def fill(store: Store, *names: str) -> None:
    """Commit a model of each name, with a blob of its own and one that all share."""
    for name in names:
        commit_model(store, name, name.encode(), b"shared")


@contextmanager
def unmounted(folder: Path) -> Iterator[None]:
    """Put an empty folder in its place."""
    aside = folder.rename(folder.parents[1] / "unmounted")
    folder.mkdir()
    yield
    folder.rmdir()
    aside.rename(folder)


def ollama_rm(store: Store, name: str) -> None:
    """Remove a manifest and its own blob, as Ollama does; our copy of the manifest stays."""
    manifest_path(store, name).unlink()
    blob_path(store, name.encode()).unlink()


prune_all = partial(prune, grace_s=0, sole_owner=True)


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


def test_an_unmounted_folder_of_manifests_is_refused(store: Store, snapshot: Snapshot) -> None:
    fill(store, "a", "b")
    place = store.root / "manifests"
    says = ("a:latest", str(place), "mounted?", "`forget=True`", "blobstore repair")
    with unmounted(place):
        is_refused(store, snapshot, *says)
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
    aged(store, b"orphan")
    prune(store)
    journal = (store.root / ".blobstore/hints/journal").read_bytes()
    with unmounted(store.blobs.path):
        is_refused(store, snapshot, str(store.blobs.path), "mounted?")
    assert (store.root / ".blobstore/hints/journal").read_bytes() == journal
    assert prune(store).freed == len(b"orphan")


def test_who_means_it_says_so_and_can_take_it_back(store: Store, tmp_path: Path) -> None:
    """Blobs and copies come back; a repair makes the model seen again without its source."""
    blobstore.import_model(write_checkpoint(tmp_path / "s"), "a", store=store, quant="int4")
    commit_model(store, "b", b"b")
    blobs = store.blobs.digests()
    raw = manifest_path(store, "a").read_bytes()
    for name in ("a", "b"):
        manifest_path(store, name).unlink()
    result = prune_all(store, forget=True)
    assert [str(name) for name in result.forgotten] == ["a:latest", "b:latest"]
    assert undo_prune(store).without_manifest == result.forgotten
    assert store.blobs.digests() == blobs
    assert repair_model("a", "no longer there", store=store).manifest_restored
    assert manifest_path(store, "a").read_bytes() == raw
    assert verify(store).is_sound


def test_rm_spares_what_a_lost_model_needs(store: Store) -> None:
    fill(store, "a", "example.org/team/b")
    with unmounted(store.root / "manifests/registry.ollama.ai"):
        removal = store.remove("example.org/team/b")
    assert [blob.size for blob in removal.removed] == [len(b"example.org/team/b")]
    assert [blob.size for blob in removal.kept] == [len(b"shared")]
    assert "a:latest" in (removal.reason or "")
    assert store.blobs.missing(store.manifest("a").descriptors) == []
    ollama_rm(store, "a")
    commit_model(store, "c", b"shared")
    removal = store.remove("c")  # it is no lost model that Ollama removed
    assert (len(removal.removed), removal.reason) == (1, None)


# Signatures in the folder: durable, limited, removed with the last model of a manifest


M = ModelName.parse("m")
ONE, TWO = Signature.of(b"one", b"\x01"), Signature.of(b"two", b"\x02")


def folder_of(store: Store, digest: Digest) -> Path:
    return store.root / ".blobstore" / "signatures" / digest.hex


def signed(store: Store, *blobs: bytes) -> Digest:
    """Store a model with two signatures; return the digest of its manifest."""
    digest = commit_model(store, "m", b"blob", *blobs).digest
    assert store.signatures.add(M, digest, [ONE, TWO]) == 2
    return digest


def backdate(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (time.time() - 2 * DAY_S,) * 2)


def test_a_damaged_file_is_an_error(store: Store) -> None:
    digest = signed(store)
    path = min(folder_of(store, digest).iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptDataError, match="is damaged") as caught:
        store.signatures.read(M, digest)
    assert caught.value.path == str(path)


def test_links_are_not_followed(store: Store, tmp_path: Path) -> None:
    digest = signed(store)
    place, elsewhere = folder_of(store, digest), tmp_path / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    for act in (
        lambda: store.signatures.read(M, digest),
        lambda: store.signatures.add(M, digest, [ONE]),
    ):
        with pytest.raises(StorageError, match="symbolic link"):
            act()
    prune(store)
    assert len(list(elsewhere.iterdir())) == 2


def test_prune_removes_those_of_the_last_model(store: Store) -> None:
    """Not while a copy of the manifest exists: a lost model can be repaired, and is signed then."""
    digest = signed(store)
    store.move("m", "n")
    other = signed(store, b"more")
    raw = manifest_path(store, "n").read_bytes()
    manifest_path(store, "n").unlink()
    backdate(folder_of(store, digest), folder_of(store, other))
    prune(store)
    assert len(store.signatures.read(M, digest)) == 2
    manifest_path(store, "n").parent.mkdir(exist_ok=True)
    manifest_path(store, "n").write_bytes(raw)
    store.remove("n")
    prune(store)
    assert not folder_of(store, digest).exists()
    assert len(store.signatures.read(M, other)) == 2


def test_prune_removes_what_no_model_has_and_what_is_old(store: Store) -> None:
    gone = Digest("ab" * 32)
    store.signatures.add(M, gone, [ONE])
    assert prune(store).leftovers == ()
    backdate(folder_of(store, gone))
    assert [left.path for left in prune(store, dry_run=True).leftovers] == [folder_of(store, gone)]
    assert folder_of(store, gone).exists()
    assert [left.nbytes for left in prune(store).leftovers] == [len(ONE.encode())]
    assert not folder_of(store, gone).exists()
