"""Two at once: imports and removals in one folder, a lock that is held for a moment."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.stores import blob_path, commit_model, descriptor

from blobstore.errors import BlobStoreError, BusyError, UsageError
from blobstore.formats.documents import Manifest
from blobstore.io import durable
from blobstore.names import ModelName
from blobstore.store.local import session
from blobstore.store.local.locks import StoreLock
from blobstore.store.local.store import Store, open_store

M = ModelName.parse("m")


def commit_in_mid_commit(
    store: Store, name: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let another commit of one blob happen in the middle of the next one."""
    real, waiting = durable.sync_file_system, [name]

    def sync(fd: int) -> None:
        if waiting:
            commit_model(store, waiting.pop(), data)
        real(fd)

    monkeypatch.setattr(session, "sync_file_system", sync)


def test_a_sibling_removed_in_mid_commit_takes_nothing_along(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_model(store, "x:old", b"old")
    real = durable.sync_file_system

    def remove_meanwhile(fd: int) -> None:
        open_store(store.root, wait_s=0).remove(ModelName.parse("x:old"))
        real(fd)

    monkeypatch.setattr(session, "sync_file_system", remove_meanwhile)
    commit_model(store, "x:new", b"new")
    assert [str(name) for name, _ in store.models()] == ["x:new"]


def test_a_model_that_is_replaced_while_it_is_moved_is_not_removed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_model(store, "x:old", b"old")
    commit_in_mid_commit(store, "x:old", b"newer", monkeypatch)
    store.move(ModelName.parse("x:old"), ModelName.parse("x:new"))
    sizes = {
        str(name): manifest.layers[0].size
        for name, manifest in store.models()
        if isinstance(manifest, Manifest)
    }
    assert sizes == {"x:new": len(b"old"), "x:old": len(b"newer")}


def test_a_move_waits_for_nobody_when_it_is_done(store: Store) -> None:
    """However long others are waited for: what is left to do is to remove empty folders."""
    commit_model(store, "m", b"one")
    with store.session():
        open_store(store.root, wait_s=3600).move(ModelName.parse("m"), ModelName.parse("n"))
    assert [str(name) for name, _ in store.models()] == ["n:latest"]


def test_a_model_that_is_made_while_another_is_moved_to_its_name_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_model(store, "m", b"one")
    commit_in_mid_commit(store, "n", b"other", monkeypatch)
    with pytest.raises(UsageError, match="n:latest already"):
        store.move(ModelName.parse("m"), ModelName.parse("n"))
    sizes = {
        str(name): manifest.layers[0].size
        for name, manifest in store.models()
        if isinstance(manifest, Manifest)
    }
    assert sizes == {"m:latest": len(b"one"), "n:latest": len(b"other")}


@pytest.mark.parametrize(
    "change",
    [
        lambda store: commit_model(store, "n", b"two"),
        lambda store: store.remove(M),
    ],
)
def test_names_change_one_after_the_other(
    store: Store, monkeypatch: pytest.MonkeyPatch, change: Callable[[Store], object]
) -> None:
    """Who looks at a manifest, links it or removes it does so alone.

    Nobody is waited for for ever.
    """
    commit_model(store, "m", b"one")
    monkeypatch.setattr("blobstore.store.local.store_folder._NAMES_WAIT_S", 0)
    with StoreLock(store.root / ".blobstore/names").exclusive():
        with pytest.raises(BusyError, match="names"):
            change(open_store(store.root))
        assert [str(name) for name, _ in store.models()] == ["m:latest"]
    change(open_store(store.root))


def test_siblings_removed_at_once(store: Store) -> None:
    for _ in range(2):
        tags = [ModelName.parse(f"x:{number}") for number in range(4)]
        for tag in tags:
            commit_model(store, str(tag), str(tag).encode())
        errors: list[BlobStoreError] = []

        def remove(tag: ModelName, errors: list[BlobStoreError] = errors) -> None:
            try:
                open_store(store.root, wait_s=600).remove(tag)
            except BlobStoreError as error:
                errors.append(error)

        threads = [threading.Thread(target=remove, args=[tag]) for tag in tags]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert store.manifests.names() == []


def test_a_blob_that_is_replaced_while_it_is_opened_is_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On FUSE a name is looked up, then its target is opened, which was just replaced."""
    commit_model(store, "m", b"one")
    real, replaced = os.open, [blob_path(store, b"one")]

    def opened(path: Path | str, *arguments: Any, **options: Any) -> int:
        if Path(path) in replaced:
            replaced.clear()
            raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", opened)
    store.blobs.check(descriptor(b"one"))
    assert replaced == []


def test_an_empty_folder_that_ollama_removes_in_mid_commit(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = durable.sync_file_system, []

    def remove_meanwhile(fd: int) -> None:
        folder = store.root / "manifests" / "registry.ollama.ai" / "library" / "x"
        for empty in (folder, *folder.parents[:2]):
            empty.rmdir()
            removed.append(empty)
        real(fd)

    monkeypatch.setattr(session, "sync_file_system", remove_meanwhile)
    commit_model(store, "x:new", b"new")
    assert removed
    assert [str(name) for name, _ in store.models()] == ["x:new"]
