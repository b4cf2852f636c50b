"""Two at once: imports, removals and readers in one folder; a model is opened as a whole."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arrays import plain
from support.checkpoints import safetensors_bytes, write_checkpoint
from support.clock import Clock
from support.stores import blob_path, commit_model, descriptor, link_by_hand, meanwhile

import blobstore
from blobstore.errors import BusyError, CorruptDataError
from blobstore.formats.documents import Manifest
from blobstore.store.care.prune import prune
from blobstore.store.local.store import Store, open_store
from blobstore.store.ports import Removal


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


FIRST, SECOND, OTHER = (
    safetensors_bytes({name: np.arange(9.0)}) for name in ("first", "second", "other")
)


def test_blobs_stay_while_a_model_is_opened(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_model(store, "m", FIRST, SECOND)
    other = open_store(store.root, wait_s=0)
    removals: list[Removal] = []
    path = blob_path(store, SECOND)
    meanwhile(monkeypatch, "open", path, lambda: removals.append(other.remove("m")))
    with blobstore.open_model("m", store=store) as model:
        assert set(model) == {"first", "second"}
    assert f"process {os.getpid()}" in (removals[0].reason or "")
    assert len(removals[0].kept) == 2


def test_an_open_model_keeps_everything_while_prune_runs(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "s"), "m", store=store, quant="int4")
    with blobstore.open_model("m", store=store) as model:
        store.remove("m")
        for _ in range(2):
            prune(store, grace_s=0, sole_owner=True)
        assert list((store.root / "blobs").iterdir()) == []
        model.verify()
        assert model.config.file_type == "int4"
        assert b"LlamaForCausalLM" in model.document("config.json")
        assert all(array.size for array in model.arrays("mlx").values())


def test_a_store_of_ollamas_is_read_without_a_lock_and_nothing_is_written(store: Store) -> None:
    link_by_hand(store, "m", {"first": FIRST})
    with store.lease() as is_held:
        assert not is_held
    assert set(blobstore.open_model("m", store=store)) == {"first"}
    assert not (store.root / ".blobstore").exists()


def test_a_store_that_may_not_be_written_to_can_be_opened(store: Store) -> None:
    commit_model(store, "m", FIRST)
    lock = store.root / ".blobstore/lock"
    lock.chmod(0o444)
    with store.lease() as is_held:
        assert is_held
        lock.chmod(0o644)
        with pytest.raises(BusyError), store.alone(0):
            pass
    lock.unlink()
    lock.symlink_to("/dev/null")
    assert set(blobstore.open_model("m", store=store)) == {"first"}


def test_a_model_that_is_replaced_while_it_is_opened_is_opened_as_it_is_then(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lease: another program acts between reading a manifest and opening blobs."""
    link_by_hand(store, "m", {"first": FIRST, "second": SECOND})

    def replace() -> None:
        blob_path(store, SECOND).unlink()
        link_by_hand(store, "m", {"other": OTHER})

    meanwhile(monkeypatch, "open", blob_path(store, SECOND), replace)
    assert set(blobstore.open_model("m", store=store)) == {"other"}


@pytest.mark.usefixtures("mapped")
def test_a_blob_that_is_cut_under_an_open_model_is_an_error_and_no_signal(store: Store) -> None:
    link_by_hand(store, "m", {"first": FIRST})
    with blobstore.open_model("m", store=store) as model:
        tensor = model["first"]
        assert plain(tensor)[8] == 8
        os.truncate(blob_path(store, FIRST), 100)
        for use in (tensor.numpy, tensor.raw, tensor.dequantize, model.verify):
            with pytest.raises(CorruptDataError, match="was truncated"):
                use()
