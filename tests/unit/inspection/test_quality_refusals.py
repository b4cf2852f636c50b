"""Refusals of a quality report: other checkpoints, missing tensors, damage while reading."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PYCODE
from support.checkpoints import (
    normal,
    safetensors_bytes,
    write_checkpoint,
)
from support.quality import imported, measured
from support.stores import blob_path, commit_model, manifest_path

import blobstore
from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    InvalidNameError,
    NotFoundError,
    TensorNotFoundError,
    UnsupportedSourceError,
    UsageError,
)
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
Snapshot = Callable[[Store], dict[str, str]]
W = "x.weight"


@pytest.mark.parametrize("quant", [None, "int4"])
@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ({"other.weight": normal("x", 32, 64)}, TensorNotFoundError),
        ({W: normal("x", 64, 32)}, UnsupportedSourceError),
        ({W: normal("x", 2, 32, 32)}, UnsupportedSourceError),
        ({W: np.zeros((32, 64), np.int32)}, UnsupportedSourceError),
        ({W: np.zeros((32, 64), np.uint8)}, UnsupportedSourceError),
    ],
    ids=["name", "shape", "rank", "I32", "U8"],
)
def test_another_checkpoint_is_refused_by_name(
    store: Store,
    tmp_path: Path,
    quant: str | None,
    source: dict[str, Array],
    kind: type[BlobStoreError],
) -> None:
    with pytest.raises(kind) as caught:
        measured(store, tmp_path, {W: normal("x", 32, 64)}, source, quant=quant)
    assert (caught.value.tensor, caught.value.model) == (W, "m:latest")
    assert repr(W) in str(caught.value)


def test_tensors_that_only_the_source_has_do_not_matter(store: Store, tmp_path: Path) -> None:
    weight = {W: normal("x", 32, 64)}
    assert (
        len(
            measured(store, tmp_path, weight, weight | {"more": np.arange(4)}, quant="int4").tensors
        )
        == 1
    )


def test_what_is_not_there_is_not_found(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="ghost:latest"):
        blobstore.measure_quality("ghost", PYCODE, store=store)
    with pytest.raises(InvalidNameError):
        blobstore.measure_quality("../x", PYCODE, store=store)
    source = write_checkpoint(tmp_path / "tiny")
    imported(store, source)
    with pytest.raises(NotFoundError, match="nowhere"):
        blobstore.measure_quality("m", tmp_path / "nowhere", store=store)
    with pytest.raises(NotFoundError, match="no weights"):
        blobstore.measure_quality("m", tmp_path, store=store)
    assert not (tmp_path / "new").exists()
    with pytest.raises(NotFoundError):
        blobstore.measure_quality("m", source, store=blobstore.open_store(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_model_without_tensor_blobs_is_of_another_kind(store: Store) -> None:
    path = manifest_path(store, "m")
    path.parent.mkdir(parents=True)
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{'0' * 64}",
        "size": 4,
    }
    path.write_text(json.dumps({"schemaVersion": 2, "layers": [layer]}))
    with pytest.raises(UnsupportedSourceError, match="GGUF"):
        blobstore.measure_quality("m", PYCODE, store=store)


def test_a_damaged_model_is_corrupt(store: Store, tmp_path: Path) -> None:
    data = safetensors_bytes({"x": normal("x", 3)})
    commit_model(store, "m", data)
    blob_path(store, data).write_bytes(data[:-1])
    with pytest.raises(CorruptDataError):
        blobstore.measure_quality(
            "m", write_checkpoint(tmp_path / "s", {"x": normal("x", 3)}), store=store
        )


def test_a_source_that_was_cut_before_is_corrupt(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s")
    imported(store, source)
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptDataError):
        blobstore.measure_quality("m", source, store=store)


@pytest.mark.parametrize("change", ["cut", "removed", "rewritten"])
def test_a_source_that_changes_while_it_is_read_is_an_error(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source = write_checkpoint(tmp_path / "s")
    imported(store, source, quant="int4")
    file = source / "model.safetensors"

    def spoil(nbytes: int, tensor: str) -> None:
        if change == "cut":
            with file.open("r+b") as opened:
                opened.truncate(5000)
        elif change == "removed":
            file.unlink(missing_ok=True)
        else:
            file.write_bytes(file.read_bytes())

    with pytest.raises(
        NotFoundError if change == "removed" else CorruptDataError, match=r"model\.safetensors"
    ):
        blobstore.measure_quality("m", source, store=store, jobs=1, progress=spoil)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/fd is Linux's")
def test_the_source_is_closed_after_an_error(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s")
    imported(store, source)
    with pytest.raises(RuntimeError, match="stop"):
        blobstore.measure_quality("m", source, store=store, jobs=1, progress=_stop)
    opened = {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
    assert os.path.realpath(source / "model.safetensors") not in opened


def _stop(nbytes: int, tensor: str) -> None:
    raise RuntimeError("stop")


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_threads_is_wrong_use(store: Store, tmp_path: Path, jobs: int) -> None:
    source = write_checkpoint(tmp_path / "s")
    with pytest.raises(UsageError, match="at least one thread"):
        blobstore.measure_quality(imported(store, source), source, store=store, jobs=jobs)


@pytest.mark.parametrize(
    ("stored", "source"),
    [(np.arange(8), np.arange(8.0)), (np.arange(8), np.arange(8, dtype=np.int32))],
    ids=["F64", "I32"],
)
def test_whole_numbers_of_another_kind_are_refused(
    store: Store, tmp_path: Path, stored: Array, source: Array
) -> None:
    with pytest.raises(UnsupportedSourceError):
        measured(store, tmp_path, {"ids": stored}, {"ids": source})
