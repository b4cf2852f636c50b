"""Two at once: imports and removals in one folder, a lock that is held for a moment."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.clock import Clock
from support.stores import blob_path, commit_model, descriptor, meanwhile

from blobstore.errors import BusyError
from blobstore.formats.documents import Manifest
from blobstore.store.local.store import Store, open_store


def sizes(store: Store) -> dict[str, int]:
    return {
        str(name): manifest.layers[0].size
        for name, manifest in store.models()
        if isinstance(manifest, Manifest)
    }


def in_mid_commit(monkeypatch: pytest.MonkeyPatch, store: Store, act: Callable[[], object]) -> None:
    """Let another act when the next commit's blobs are visible and its manifest is not."""
    meanwhile(monkeypatch, "open", store.root / "blobs", act)


def test_a_sibling_is_removed_in_mid_commit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_model(store, "x:old", b"old")
    other = open_store(store.root, wait_s=0)
    in_mid_commit(monkeypatch, store, lambda: other.remove("x:old"))
    commit_model(store, "x:new", b"new")
    assert sizes(store) == {"x:new": 3}


def test_a_folder_is_removed_in_mid_commit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.root / "manifests/registry.ollama.ai/library/x"
    removed: list[Path] = []

    def remove() -> None:
        os.removedirs(folder)
        removed.append(folder)

    in_mid_commit(monkeypatch, store, remove)
    commit_model(store, "x:new", b"new")
    assert removed
    assert sizes(store) == {"x:new": 3}


def test_a_replaced_model_is_not_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_model(store, "x:old", b"old")
    in_mid_commit(monkeypatch, store, lambda: commit_model(store, "x:old", b"newer"))
    store.move("x:old", "x:new")
    assert sizes(store) == {"x:new": len(b"old"), "x:old": len(b"newer")}


@pytest.mark.parametrize(
    "change", [lambda store: commit_model(store, "n", b"two"), lambda store: store.remove("m")]
)
def test_names_change_one_after_the_other(
    store: Store, monkeypatch: pytest.MonkeyPatch, change: Callable[[Store], object]
) -> None:
    """Who looks at a manifest, links it or removes it does so alone; nobody waits for ever."""
    commit_model(store, "m", b"one")
    with store.names_lock.exclusive(), monkeypatch.context() as patch:
        clock = Clock()
        patch.setattr(time, "monotonic", clock)
        patch.setattr(time, "sleep", clock.sleep)
        with pytest.raises(BusyError, match="names"):
            change(store)
        assert sizes(store) == {"m:latest": 3}
    change(store)


def test_a_blob_is_replaced_while_it_is_opened(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On FUSE a name is looked up, then its target is opened, which was just replaced."""
    commit_model(store, "m", b"one")
    real, replaced = os.open, [os.fspath(blob_path(store, b"one"))]

    def opened(path: Path | str, *arguments: Any, **options: Any) -> int:
        if os.fspath(path) in replaced:
            replaced.clear()
            raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", opened)
    store.blobs.check(descriptor(b"one"))
    assert replaced == []
