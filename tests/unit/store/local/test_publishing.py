"""Publishing: the times of blobs, and what a blob that is there already has to be."""

from __future__ import annotations

import os

import pytest
from support.stores import blob_path, commit_model, descriptor, manifest_path

from blobstore.errors import CorruptDataError, StorageError
from blobstore.formats.documents import Manifest
from blobstore.names import ModelName
from blobstore.store.local import blobs as blobs_module
from blobstore.store.local.store import Store

NAME = ModelName.parse("m")
MINUTE_S = 60


@pytest.mark.parametrize("old_s", [MINUTE_S, -MINUTE_S])
def test_a_blob_that_waited_long_is_made_young(
    store: Store, monkeypatch: pytest.MonkeyPatch, old_s: int
) -> None:
    """A young one is not touched: its time is the one that was noted when it was written."""
    monkeypatch.setattr(blobs_module, "_OLD_S", old_s)
    with store.session() as session:
        blob = session.put(b"one")
        os.utime(blob.path, (1, 1))
        session.publish(NAME, Manifest(layers=(descriptor(b"one"),)))
    written = blob_path(store, b"one").stat().st_mtime
    assert (written > 1) == (old_s < 0)


def test_a_large_manifest_of_zeros_is_replaced(store: Store) -> None:
    """As a power cut leaves the manifests of other programs."""
    path = manifest_path(store, "m")
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(2**21))
    assert commit_model(store, "m", b"one").raw == path.read_bytes()


@pytest.mark.parametrize("kind", ["another size", "a folder", "a link"])
def test_what_is_not_a_blob_is_not_published(store: Store, kind: str) -> None:
    path = blob_path(store, b"one")
    path.parent.mkdir(parents=True, exist_ok=True)
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
    assert store.manifests.raw(NAME) is None
