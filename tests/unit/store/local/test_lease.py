"""A model is opened as a whole while others remove and replace.

A store that may not be written to is read all the same.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arrays import plain
from support.checkpoints import safetensors_bytes
from support.stores import blob_path, commit_model, link_by_hand

import blobstore
from blobstore.errors import BusyError, CorruptDataError
from blobstore.formats.safetensors.header import Header, header_of
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.care.prune import prune
from blobstore.store.local.blobs import BlobFolder
from blobstore.store.local.store import Store, open_store

M = ModelName.parse("m")
FIRST, SECOND, OTHER = (
    safetensors_bytes({name: np.arange(9.0)}) for name in ("first", "second", "other")
)


def at_blob(monkeypatch: pytest.MonkeyPatch, blob: bytes, act: Callable[[], object]) -> None:
    """Call ``act`` once, just before the blob of these bytes is opened."""
    real, waiting = BlobFolder.reader, [act]

    def open_file(self: BlobFolder, digest: Digest) -> object:
        if waiting and digest.file_name == Path(blob_path_name(blob)).name:
            waiting.pop()()
        return real(self, digest)

    monkeypatch.setattr(BlobFolder, "reader", open_file)


def blob_path_name(blob: bytes) -> str:
    return blob_path(Store("."), blob).name


def test_blobs_are_not_removed_while_a_model_is_opened(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_model(store, "m", FIRST, SECOND)
    other = open_store(store.root, wait_s=0)
    removals = []
    at_blob(monkeypatch, SECOND, lambda: removals.append(other.remove(M)))
    with blobstore.open_model("m", store=store) as model:
        assert set(model) == {"first", "second"}
    assert removals[0].reason is not None
    assert f"process {os.getpid()}" in removals[0].reason
    assert len(removals[0].kept) == 2


def test_an_open_model_keeps_everything_while_prune_runs(store: Store, tmp_path: Path) -> None:
    from support.checkpoints import write_checkpoint

    blobstore.import_model(write_checkpoint(tmp_path / "s"), "m", store=store, quant="int4")
    with blobstore.open_model("m", store=store) as model:
        store.remove(M)
        prune(store, grace_s=0, sole_owner=True)
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

    at_blob(monkeypatch, SECOND, replace)
    assert set(blobstore.open_model("m", store=store)) == {"other"}


@pytest.mark.usefixtures("mapped")
def test_a_blob_that_is_cut_under_an_open_model_is_an_error_and_no_signal(store: Store) -> None:
    link_by_hand(store, "m", {"first": FIRST})
    with blobstore.open_model("m", store=store) as model:
        assert plain(model["first"])[8] == 8
        os.truncate(blob_path(store, FIRST), 100)
        for use in (
            model["first"].numpy,
            model["first"].raw,
            model["first"].dequantize,
            model.verify,
        ):
            with pytest.raises(CorruptDataError, match="was cut since it was opened"):
                use()


@pytest.mark.parametrize(("how", "says"), [("read", "ends before"), ("mapped", "was cut")])
def test_a_blob_that_is_cut_before_it_is_read_or_mapped_is_an_error(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    how: str,
    says: str,
) -> None:
    if how == "mapped":
        request.getfixturevalue("mapped")
    link_by_hand(store, "m", {"first": FIRST})
    real = header_of

    def cut(reader: OpenReader, *rest: Any, **options: Any) -> Header:
        header = real(reader, *rest, **options)
        os.truncate(blob_path(store, FIRST), 100)
        return header

    monkeypatch.setattr("blobstore.store.stored_model.header_of", cut)
    with pytest.raises(CorruptDataError, match=says):
        blobstore.open_model("m", store=store)


def test_loaders_and_prunes_at_once(store: Store) -> None:
    """A name is given to one model and then to another, again and again.

    Who opens it sees one of both, whole.
    """
    commit_model(store, "m", FIRST, SECOND)
    seen = {
        frozenset({"other"}): threading.Event(),
        frozenset({"first", "second"}): threading.Event(),
    }
    errors: list[BaseException] = []
    done = threading.Event()

    def load() -> None:
        while not done.is_set():
            try:
                with blobstore.open_model("m", store=open_store(store.root), verify=True) as model:
                    seen[frozenset(model)].set()
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            for blobs, names in zip(((OTHER,), (FIRST, SECOND)), seen, strict=True):
                commit_model(store, "m", *blobs)
                prune(store, grace_s=0, sole_owner=True, wait_s=60)
                assert seen[names].wait(60)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert errors == []
