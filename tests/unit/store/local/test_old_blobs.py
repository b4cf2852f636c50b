"""Stores that the first Ollamas wrote: their blobs are called ``sha256:…``."""

from __future__ import annotations

from support.stores import blob_path, commit_model

from blobstore.names import ModelName
from blobstore.store.local.store import Store


def test_a_blob_of_an_old_ollama_is_removed_with_its_model(store: Store) -> None:
    commit_model(store, "m", b"one")
    new = blob_path(store, b"one")
    old = new.rename(new.with_name(new.name.replace("-", ":")))
    removed = store.remove(ModelName.parse("m")).removed
    assert [blob.size for blob in removed if blob.size == len(b"one")] == [3]
    assert not old.exists()
