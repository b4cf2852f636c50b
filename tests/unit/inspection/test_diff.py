"""diff: what changed between two models, from headers, bytes and values."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import normal, safetensors_bytes, write_checkpoint
from support.stores import (
    layer_by_hand,
    link_by_hand,
    manifest_path,
    stored_arrays,
    with_newline_config,
)

import blobstore
from blobstore.errors import NotFoundError, UsageError
from blobstore.inspection.comparison import ModelDiff, diff_models
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]


def link(store: Store, name: str, arrays: dict[str, Array]) -> None:
    link_by_hand(store, name, {k: safetensors_bytes({k: array}) for k, array in arrays.items()})


def names(found: ModelDiff) -> tuple[list[str], list[str], list[str]]:
    return (
        [fact.name for fact in found.added],
        [fact.name for fact in found.removed],
        [change.before.name for change in found.changed],
    )


def test_added_removed_changed_and_equal_tensors(store: Store) -> None:
    both = {"same": np.arange(3.0)}
    link(store, "a", {**both, "gone": np.ones(4), "other": np.zeros(5), "shape": np.zeros((2, 3))})
    link(store, "b", {**both, "new": np.ones(4), "other": np.ones(5), "shape": np.zeros((3, 2))})
    found = diff_models("a", "b", store=store, error=True)
    assert names(found) == (["new"], ["gone"], ["other", "shape"])
    assert (found.equal, found.shared_bytes) == (1, len(safetensors_bytes(both)))
    other, shape = found.changed
    assert other.errors is not None
    assert (other.errors.rmse, other.errors.max_error, other.errors.count) == (1, 1, 5)
    assert (shape.before.shape, shape.after.shape, shape.errors) == ((2, 3), (3, 2), None)
    assert names(diff_models("b", "a", store=store)) == (["gone"], ["new"], ["other", "shape"])


def test_tensors_of_other_blobs_with_the_same_bytes_are_equal(store: Store) -> None:
    """A header may differ in padding, and a group of tensors in one of them."""
    a, b = np.arange(3.0), np.arange(4.0)
    link_by_hand(store, "a", {"g": safetensors_bytes({"x": a, "y": b})})
    link_by_hand(store, "b", {"g": safetensors_bytes({"x": a, "y": b + 1}, {"some": "metadata"})})
    found = diff_models("a", "b", store=store)
    assert (names(found), found.equal, found.shared_bytes) == (([], [], ["y"]), 1, 0)


def test_a_changed_type_and_its_error(store: Store) -> None:
    weights = normal("w", 8, 256)
    arrays, metadata = stored_arrays("w", weights, "int4")
    link(store, "a", {"w": weights})
    link_by_hand(store, "b", {"w": safetensors_bytes(arrays, metadata)})
    (change,) = diff_models("a", "b", store=store, error=True).changed
    with blobstore.open_model("b", store=store) as model:
        error = model["w"].dequantize().astype(np.float64) - weights.astype(np.float64)
    assert (change.before.type_name, change.after.type_name) == ("BF16", "int4/32")
    assert change.errors is not None
    assert change.errors.rmse == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-12)
    assert change.errors.max_error == np.abs(error).max()


def test_scales_alone_make_a_change(store: Store) -> None:
    arrays, metadata = stored_arrays("w", normal("w", 8, 256), "int4")
    double = (arrays["w.scale"].astype(np.float32) * 2).astype(ml_dtypes.bfloat16)
    as_f16 = {part: arrays[part].view(np.float16) for part in ("w.scale", "w.bias")}
    link_by_hand(store, "a", {"w": safetensors_bytes(arrays, metadata)})
    for name, other in (("b", {"w.scale": double}), ("c", as_f16)):  # values; the dtype of bits
        link_by_hand(store, name, {"w": safetensors_bytes({**arrays, **other}, metadata)})
        assert names(diff_models("a", name, store=store)) == ([], [], ["w"])


INF, NAN = np.inf, np.nan
LARGE = np.zeros(2**20 + 7)
VALUES: list[tuple[Any, Any, float, int]] = [
    (LARGE, np.concatenate([LARGE[1:], [3]]), 3, 0),  # in several chunks
    ([1e300, 1e308], [-1e300, -1e308], INF, 0),  # squares that no float holds
    ([INF, NAN, 1, 2, 3], [INF, NAN, INF, 2, 5], 2, 1),  # what both have is no error
]


def test_errors_of_values(store: Store) -> None:
    for number, name in enumerate("ab"):
        link(store, name, {f"w{n}": np.array(row[number]) for n, row in enumerate(VALUES)})
    changed = diff_models("a", "b", store=store, error=True, jobs=2).changed
    for change, (before, _, largest, odd) in zip(changed, VALUES, strict=True):
        found = change.errors
        assert found is not None
        assert (found.count, found.max_error, found.odd_values) == (len(before), largest, odd)


def test_documents_and_texts(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s")
    (source / "old.json").write_text("{}")
    blobstore.import_model(source, "a", store=store, licenses=["one", "two"])
    (source / "old.json").rename(source / "new.json")
    (source / "config.json").write_text(json.dumps({"hidden_size": 3}))
    blobstore.import_model(source, "b", store=store, licenses=["one", "three"], template="hi")
    documents = diff_models("a", "b", store=store).documents
    assert documents.added == ("new.json", "template")
    assert documents.removed == ("old.json",)
    assert documents.changed == ("config.json", "license 2")


def test_configs_that_differ_in_the_last_newline_are_equal(store: Store, tmp_path: Path) -> None:
    """Newer Ollamas write one."""
    blobstore.import_model(write_checkpoint(tmp_path / "s"), "m", store=store)
    with_newline_config(store, "m", "n")
    assert diff_models("m", "n", store=store).documents.changed == ()
    assert verify(store).is_sound


def test_models_of_another_kind_are_compared_by_their_blobs(store: Store) -> None:
    for name, data in (("a", b"GGUF one"), ("b", b"GGUF two")):
        layer = layer_by_hand(store, "", data) | {"mediaType": "application/vnd.ollama.image.model"}
        manifest_path(store, name).parent.mkdir(parents=True)
        manifest_path(store, name).write_text(json.dumps({"schemaVersion": 2, "layers": [layer]}))
    found = diff_models("a", "b", store=store, error=True)
    assert (found.documents.changed, found.equal, found.shared_bytes) == (("model",), 0, 0)
    with pytest.raises(NotFoundError):
        diff_models("a", "none", store=store)
    with pytest.raises(UsageError):
        diff_models("a", "a", store=store, jobs=0)
