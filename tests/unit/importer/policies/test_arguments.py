"""Mistakes in an import's arguments: typed errors, and an unchanged store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import normal, safetensors_bytes, write_checkpoint

import blobstore
from blobstore.errors import (
    BlobStoreError,
    HeaderError,
    NotFoundError,
    StorageError,
    UnsupportedSourceError,
    UsageError,
)
from blobstore.kernels.arrays import Array
from blobstore.store.local.store import Store

UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
SEARCH: dict[str, Any] = {"quant": "int4", "method": "search"}
ONES = np.ones(64, np.float32)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"qaunt": "int4"}, "no option 'qaunt'"),
        ({"rules": "*=int4"}, "rules is"),
        ({"licenses": "MIT"}, "licenses is"),
        ({"parameters": {"temperature": 0.5}}, "parameters is"),
        ({"rules": ["*q=none/32"]}, "the rule .*'none'"),
        ({"rules": ["*q=int4/x"]}, "the rule .*groups of 0"),
        ({"alignment": 2**26}, "power of two"),
        ({"requantize": True}, "quantizing again needs a quantization type"),
        ({"importance": {UP: ONES}}, "importance needs the method search"),
        ({"importance": {UP: ONES}, "quant": "int4"}, "importance needs the method search"),
        ({"importance": {UP: ONES}, "quant": "none", "method": "search"}, "needs the method"),
        ({"method": "search"}, "the method search needs a quantization type"),
        ({"quant": "int4", "method": "Search"}, "unknown quantization method 'Search'"),
        ({"global_scale": True}, "only nvfp4 has a global scale"),
        ({"global_scale": True, "quant": "mxfp4"}, "only nvfp4 has a global scale"),
    ],
)
def test_options_that_are_wrong_use(source: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        blobstore.plan_import(source, **options)


def changed(value: float) -> Array:
    vector = ONES.copy()
    vector[5] = value
    return vector


@pytest.mark.parametrize(
    ("vectors", "says"),
    [
        ({"nobody.weight": ONES}, "'nobody.weight'"),
        ({NORM: ONES}, NORM),
        ({UP: np.ones(65, np.float32)}, "65 values for 64 columns"),
        ({UP: np.ones(0, np.float32)}, "0 values for 64 columns"),
        ({UP: changed(-1.0)}, "column 5"),
        ({UP: changed(np.nan)}, "column 5"),
        ({UP: changed(np.inf)}, "column 5"),
        ({UP: np.ones((1, 64), np.float32)}, "[1, 64]"),
    ],
)
def test_importance_that_does_not_fit(
    source: Path, tmp_path: Path, vectors: dict[str, Array], says: str
) -> None:
    file = tmp_path / "importance.safetensors"
    file.write_bytes(safetensors_bytes(vectors))
    for importance in (vectors, file):
        with pytest.raises(UsageError) as caught:
            blobstore.plan_import(source, importance=importance, **SEARCH)
        assert "importance" in caught.value.message
    assert says in caught.value.message


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_a_file_of_importance_is_float32(source: Path, tmp_path: Path, dtype: Any) -> None:
    file = tmp_path / "importance.safetensors"
    file.write_bytes(safetensors_bytes({UP: ONES.astype(dtype)}))
    with pytest.raises(UsageError, match=r"\[64\]"):
        blobstore.plan_import(source, importance=file, **SEARCH)


@pytest.mark.parametrize(
    "importance",
    [{1: np.ones(64)}, {"\ud800": np.ones(64)}, {UP: [[1.0], [1.0, 2.0]]}],
    ids=["int", "text", "ragged"],
)
def test_a_mapping_that_is_not_of_names_to_vectors_is_wrong_use(
    source: Path, importance: Any
) -> None:
    with pytest.raises(UsageError):
        blobstore.plan_import(source, importance=importance, **SEARCH)


def _cut(path: Path) -> None:
    path.write_bytes(safetensors_bytes({UP: ONES})[:-1])


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda _: None, NotFoundError),
        (os.mkfifo, StorageError),
        (Path.mkdir, StorageError),
        (Path.touch, HeaderError),
        (_cut, HeaderError),
    ],
    ids=["missing", "pipe", "folder", "empty", "cut"],
)
def test_importance_that_is_not_a_file_of_vectors(
    source: Path, tmp_path: Path, make: Callable[[Path], object], kind: type[BlobStoreError]
) -> None:
    make(tmp_path / "importance")
    with pytest.raises(kind, match="importance"):
        blobstore.plan_import(source, importance=tmp_path / "importance", **SEARCH)


def test_a_name_that_a_global_scale_needs_is_refused(
    store: Store, tmp_path: Path, snapshot: Callable[[Store], dict[str, str]]
) -> None:
    tensors = {"x.weight": normal("x", 32, 64), "x.weight.global_scale": normal("g", 1)}
    source = write_checkpoint(tmp_path / "m", tensors)
    with pytest.raises(UnsupportedSourceError, match=r"x\.weight\.global_scale"):
        blobstore.import_model(source, "m", store=store, quant="nvfp4", global_scale=True)
    assert snapshot(store) == {}
