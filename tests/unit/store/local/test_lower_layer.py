"""Existing folders are never renamed: overlayfs refuses that for a container's image.

On a real overlayfs: tests/faults/test_overlay.py.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest
from support.checkpoints import small_tensors, write_checkpoint
from support.stores import blob_path, commit_model, layer_by_hand

import blobstore
from blobstore.names import ModelName
from blobstore.store.care.prune import prune, undo_prune
from blobstore.store.local.store import Store

KEY = "0" * 64


def bake(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse renames of the folders that the store has now, as overlayfs does."""
    lower = {str(path) for path in store.root.rglob("*") if path.is_dir()}
    real = os.rename

    def rename(source: str | Path, target: str | Path, **options: int) -> None:
        if options or str(source) in lower:  # with an open folder: only folders were renamed so
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)


def age(store: Store, data: bytes) -> None:
    layer_by_hand(store, "", data)
    os.utime(blob_path(store, data), (0, 0))


def test_a_trash_that_was_there_before(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_model(store, "m", b"one")
    commit_model(store, "gone", b"one")
    store.manifests.remove(ModelName.parse("gone"))
    age(store, b"first")
    assert [str(name) for name in prune(store).forgotten] == ["gone:latest"]
    age(store, b"orphan")
    bake(store, monkeypatch)
    result = prune(store)
    assert ([blob.size for blob in result.removed], result.freed) == ([6], 5)
    assert len(undo_prune(store).restored) == 1


def test_what_a_killed_import_left_and_everything_else(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_checkpoint(tmp_path / "source", small_tensors())
    blobstore.import_model(source, "m", store=store)
    with suppress(KeyboardInterrupt), store.session() as session:
        session.note(KEY, session.put(b"left"))
        raise KeyboardInterrupt
    bake(store, monkeypatch)
    with store.session() as session:
        assert session.recall(KEY, 4, verify=False) is not None
    blobstore.import_model(source, "m", store=store, quant="int4")
    store.copy(ModelName.parse("m"), ModelName.parse("n"))
    store.move(ModelName.parse("m"), ModelName.parse("example.org/team/m"))
    store.remove(ModelName.parse("n"))
    prune(store, grace_s=0, sole_owner=True)
    assert [str(name) for name, _ in store.models()] == ["example.org/team/m:latest"]
