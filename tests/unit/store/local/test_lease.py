"""A model is opened as a whole while others remove and replace, also in a read-only store."""

import os
from pathlib import Path

import numpy as np
import pytest
from support.arrays import plain
from support.checkpoints import safetensors_bytes, write_checkpoint
from support.stores import blob_path, commit_model, link_by_hand, meanwhile

import blobstore
from blobstore.errors import BusyError, CorruptDataError
from blobstore.store.care.prune import prune
from blobstore.store.local.store import Store, open_store
from blobstore.store.ports import Removal

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
