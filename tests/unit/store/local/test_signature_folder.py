"""Signatures in a store's folder: durable, limited, removed with the last model of a manifest."""

import os
import time
from pathlib import Path

import pytest
from support.stores import commit_model, manifest_path

from blobstore.errors import CorruptDataError, StorageError
from blobstore.formats.oci import Signature
from blobstore.names import Digest, ModelName
from blobstore.store.care.prune import DAY_S, prune
from blobstore.store.local.store import Store

M = ModelName.parse("m")
ONE, TWO = Signature.of(b"one", b"\x01"), Signature.of(b"two", b"\x02")


def folder_of(store: Store, digest: Digest) -> Path:
    return store.root / ".blobstore" / "signatures" / digest.hex


def signed(store: Store, name: str = "m", *blobs: bytes) -> Digest:
    """Store a model with two signatures; return the digest of its manifest."""
    digest = commit_model(store, name, *(blobs or (b"blob",))).digest
    assert store.signatures.add(ModelName.parse(name), digest, [ONE, TWO]) == 2
    return digest


def aged(*paths: Path) -> None:
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
    store.copy("m", "n")
    other = signed(store, "other", b"blob", b"more")
    store.remove("m")
    raw = manifest_path(store, "n").read_bytes()
    manifest_path(store, "n").unlink()
    aged(folder_of(store, digest), folder_of(store, other))
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
    aged(folder_of(store, gone))
    assert [left.path for left in prune(store, dry_run=True).leftovers] == [folder_of(store, gone)]
    assert folder_of(store, gone).exists()
    assert [left.nbytes for left in prune(store).leftovers] == [len(ONE.encode())]
    assert not folder_of(store, gone).exists()
