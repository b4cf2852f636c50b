"""Imports with a search, importance and global scales store what the kernels find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import BF16, normal, safetensors_bytes, write_checkpoint
from support.chunks import chunks_of
from support.weights import assert_same_parts, random_importance

import blobstore
from blobstore import QuantizedArray
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
W = "x.weight"
UP = "model.layers.0.mlp.up_proj.weight"
EXPERT = "model.layers.0.mlp.experts.{}.up_proj.weight"
STACK = "model.layers.0.mlp.experts.up_proj.weight"
CHUNK = 8192


def imported(
    store: Store, folder: Path, tensors: dict[str, Array], **options: Any
) -> blobstore.Model:
    source = write_checkpoint(folder / "m", tensors)
    with chunks_of(CHUNK):  # ends inside a row of 192
        blobstore.import_model(source, "m", store=store, **options)
    return blobstore.open_model("m", store=store, verify=True)


def parts(model: blobstore.Model, name: str = W) -> QuantizedArray[Array]:
    array = model[name].numpy()
    assert isinstance(array, QuantizedArray)
    return array


def quantized(weights: Array, quant: str, **options: Any) -> QuantizedArray[Array]:
    """Return what the kernels make of the weights with an import's options."""
    return blobstore.quantize(weights, quant, **options)


@pytest.mark.parametrize(
    ("quant", "kind", "is_weighed"),
    [
        ("int4", BF16, True),
        ("int8", BF16, False),
        ("nvfp4", BF16, False),
        ("mxfp4", np.float32, True),
        ("mxfp8", BF16, False),
    ],
)
def test_a_search_stores_what_the_kernel_finds(
    store: Store, tmp_path: Path, quant: str, kind: Any, is_weighed: bool
) -> None:
    weights = normal("w", 70, 192, dtype=kind)
    importance = random_importance(192) if is_weighed else None
    given = None if importance is None else {W: importance}
    model = imported(store, tmp_path, {W: weights}, quant=quant, method="search", importance=given)
    wanted = blobstore.quantize(weights, quant, method="search", importance=importance)
    assert_same_parts(parts(model), wanted)


def test_each_expert_has_its_own_importance(store: Store, tmp_path: Path) -> None:
    tensors = {EXPERT.format(e): normal(f"e{e}", 32, 64) for e in range(3)}
    importance = {EXPERT.format(e): random_importance(64, seed=e) for e in (0, 2)}
    options: dict[str, Any] = {"quant": "int4", "method": "search", "importance": importance}
    stacked = parts(imported(store, tmp_path, tensors, experts="stacked", **options), STACK)
    packed = imported(store, tmp_path, tensors, experts="packed", **options)
    for e, (name, weights) in enumerate(tensors.items()):
        weighed = importance.get(name)
        wanted = blobstore.quantize(weights, "int4", method="search", importance=weighed)
        assert_same_parts(parts(packed, name), wanted)
        assert stacked.weight[e].tobytes() == wanted.weight.tobytes()
        assert stacked.scale[e].tobytes() == wanted.scale.tobytes()


def test_importance_is_recorded_by_its_values(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    vectors = {UP: random_importance(64), "lm_head.weight": random_importance(64, seed=1)}
    file = tmp_path / "importance.safetensors"
    file.write_bytes(safetensors_bytes(vectors, {"made": "elsewhere"}))

    def recorded(importance: Any) -> str | None:
        options = {"quant": "int4", "method": "search", "importance": importance}
        plan = blobstore.plan_import(source, **options)
        found: str | None = json.loads(plan.documents["blobstore.json"])["options"]["importance"]
        return found

    same: list[Any] = [file, vectors, dict(reversed(vectors.items()))]
    same += [{name: vector.astype(np.float64) for name, vector in vectors.items()}]
    others: list[Any] = [{UP: vectors[UP]}, {UP: vectors[UP] + 1}, {}, None]
    assert len({recorded(form) for form in same}) == 1
    assert len({recorded(form) for form in (file, *others)}) == 5


@pytest.mark.parametrize(("method", "scale"), [("minmax", 1e-4), ("search", 0.02), ("minmax", 30)])
def test_a_global_scale_is_stored_and_read_back(
    store: Store, tmp_path: Path, method: str, scale: float
) -> None:
    weights = normal("w", 70, 192, scale=scale)
    options: dict[str, Any] = {"quant": "nvfp4", "method": method, "global_scale": True}
    model = imported(store, tmp_path, {W: weights}, **options)
    wanted = quantized(weights, **options)
    assert wanted.global_scale is not None
    assert_same_parts(parts(model), wanted)
    np.testing.assert_array_equal(model[W].dequantize(), blobstore.dequantize(wanted))
    for library in ("torch", "mlx"):
        stored = getattr(model[W], library)().global_scale
        assert float(stored[0]) == float(wanted.global_scale[0])


def test_experts_have_a_global_scale_each_or_one_for_the_stack(
    store: Store, tmp_path: Path
) -> None:
    tensors = {EXPERT.format(e): normal(f"e{e}", 32, 64, scale=0.001 * 8**e) for e in range(3)}
    options: dict[str, Any] = {"quant": "nvfp4", "method": "search", "global_scale": True}
    packed = imported(store, tmp_path, tensors, experts="packed", **options)
    for name, weights in tensors.items():
        assert_same_parts(parts(packed, name), quantized(weights, **options))
    stacked = imported(store, tmp_path, tensors, experts="stacked", **options)
    whole = quantized(np.stack([*tensors.values()]), **options)
    assert_same_parts(parts(stacked, STACK), whole)
