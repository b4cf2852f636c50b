"""Existing folders are never renamed: overlayfs refuses that for a container's image.

On a real overlayfs: tests/faults/test_overlay.py.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest
from support.stores import blob_path, commit_model, layer_by_hand

from blobstore.store.care.prune import prune, undo_prune
from blobstore.store.local.store import Store

KEY = "0" * 64


def age(store: Store, data: bytes) -> None:
    layer_by_hand(store, "", data)
    os.utime(blob_path(store, data), (0, 0))


def test_a_store_of_a_containers_image(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a trash, and what a killed import left."""
    commit_model(store, "m", b"one", b"two")
    age(store, b"first")
    prune(store)
    age(store, b"orphan")
    with suppress(KeyboardInterrupt), store.session() as session:
        session.note(KEY, session.put(b"left"))
        raise KeyboardInterrupt
    lower = {str(path) for path in store.root.rglob("*") if path.is_dir()}
    real = os.rename

    def rename(source: str | Path, target: str | Path, **options: int) -> None:
        if options or str(source) in lower:  # with an open folder: only folders were renamed so
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    result = prune(store)
    assert ([blob.size for blob in result.removed], result.freed) == ([len(b"orphan")], 5)
    assert len(undo_prune(store).restored) == 1
    with store.session() as session:
        assert session.recall(KEY, 4, verify=False) is not None
    commit_model(store, "m", b"one", b"three")
    store.copy("m", "n")
    store.move("m", "example.org/team/m")
    store.remove("n")
    prune(store, grace_s=0, sole_owner=True)
    assert {path.read_bytes() for path in (store.root / "blobs").iterdir()} == {b"one", b"three"}
    assert [str(name) for name, _ in store.models()] == ["example.org/team/m:latest"]
