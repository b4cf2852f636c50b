"""--requantize: a quantized source is dequantized, and quantized like a float source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import PYCODE, QUANT_TYPES
from support.arrays import plain
from support.checkpoints import LLAMA_CONFIG, normal, write_checkpoint
from support.producers import COPIED, Kind, Stored, block_fp8, mlx_affine, nvfp4
from support.weights import assert_same_parts

import blobstore
from blobstore import QuantizedArray
from blobstore.errors import UnsupportedSourceError
from blobstore.model.loader import Model
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
LAYER = "model.layers.0"
EXPERTS = f"{LAYER}.mlp.experts"
KINDS = {**COPIED, "fp8": block_fp8()}
FEW = {name: KINDS[name] for name in ("mlx int4/64 bfloat16", "modelopt", "fp8")}


def tensors_of(*weights: Stored) -> dict[str, Array]:
    return {name: array for weight in weights for name, array in weight.tensors.items()}


def requantized(
    store: Store, folder: Path, kind: Kind, tensors: dict[str, Array], **options: Any
) -> Model:
    """Import with --requantize, and return the opened model."""
    source = write_checkpoint(folder, tensors, {**LLAMA_CONFIG, **kind.config})
    blobstore.import_model(source, "m", store=store, requantize=True, **options)
    return blobstore.open_model("m", store=store, verify=True)


def values_of(weight: Stored) -> Array:
    """Return the values to quantize again: in the dtype of affine scales, else in BF16."""
    return weight.values.astype(weight.arrays[".bias"].dtype if ".bias" in weight.arrays else BF16)


def assert_quantized(model: Model, name: str, values: Array, quant: str, **options: Any) -> None:
    """Fail unless the tensor is ``values``, quantized."""
    stored = model[name].numpy()
    assert isinstance(stored, QuantizedArray)
    assert_same_parts(stored, blobstore.quantize(values, quant, **options), name)


def assert_kept(model: Model, weight: Stored) -> None:
    """Fail unless the tensor has the source's codes and scales."""
    stored = model[weight.name].numpy()
    assert isinstance(stored, QuantizedArray)
    assert stored.quant_type.value == weight.quant_type
    parts: dict[str, Any] = {
        "": stored.weight,
        ".scale": stored.scale,
        ".bias": stored.bias,
        ".global_scale": stored.global_scale,
    }
    for suffix, part in weight.arrays.items():
        assert parts[suffix].tobytes() == part.tobytes(), suffix


@pytest.mark.parametrize(("number", "kind"), [*enumerate(KINDS.values())], ids=KINDS)
def test_a_matrix(store: Store, tmp_path: Path, kind: Kind, number: int) -> None:
    quant = QUANT_TYPES[number % len(QUANT_TYPES)]
    weight = kind.make(f"{LAYER}.self_attn.o_proj", (8, 256))
    with requantized(store, tmp_path / "s", kind, weight.tensors, quant=quant) as model:
        assert list(model) == [weight.name]
        assert_quantized(model, weight.name, values_of(weight), quant)
        assert model.config.file_type == quant


@pytest.mark.parametrize("kind", FEW.values(), ids=FEW)
def test_what_the_policy_leaves_alone_keeps_its_codes(
    store: Store, tmp_path: Path, kind: Kind
) -> None:
    kept = kind.make("model.embed_tokens", (8, 256))
    other = kind.make(f"{LAYER}.mlp.up_proj", (8, 256))
    with requantized(store, tmp_path / "s", kind, tensors_of(kept, other), quant="int4") as model:
        assert_quantized(model, other.name, values_of(other), "int4")
        if kept.arrays:
            assert_kept(model, kept)
        else:
            assert plain(model[kept.name]).dtype == BF16
        np.testing.assert_array_equal(model[kept.name].dequantize(), kept.values)


def test_rules_say_which(store: Store, tmp_path: Path) -> None:
    kind = mlx_affine(8, 64)
    names = ("lm_head", f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.gate_proj")
    head, up, gate = (kind.make(name, (8, 256)) for name in names)
    rules = ["*proj.weight=int4/64", "*gate_proj*=none"]
    tensors = tensors_of(head, up, gate)
    with requantized(store, tmp_path / "s", kind, tensors, rules=rules) as model:
        assert_kept(model, head)
        assert_quantized(model, up.name, values_of(up), "int4", group_size=64)
        assert_kept(model, gate)
        assert model.config.file_type == ""


@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize("kind", FEW.values(), ids=FEW)
def test_experts(store: Store, tmp_path: Path, kind: Kind, experts: str) -> None:
    weights = [kind.make(f"{EXPERTS}.{expert}.up_proj", (8, 256)) for expert in range(3)]
    options: dict[str, Any] = {"quant": "nvfp4", "global_scale": True, "experts": experts}
    with requantized(store, tmp_path / "s", kind, tensors_of(*weights), **options) as model:
        if experts == "packed":
            for weight in weights:
                assert_quantized(model, weight.name, values_of(weight), "nvfp4", global_scale=True)
        else:
            stack = np.stack([values_of(weight) for weight in weights])
            name = f"{EXPERTS}.up_proj.weight"
            assert_quantized(model, name, stack, "nvfp4", global_scale=True)


@pytest.mark.parametrize(("experts", "modelopt"), [("packed", True), ("stacked", False)])
def test_experts_that_are_left_alone_keep_a_global_scale_each(
    store: Store, tmp_path: Path, experts: str, modelopt: bool
) -> None:
    """Rows of 48 have no groups of 32, which int4 needs; a packed group is kept as a whole."""
    kinds = [nvfp4(modelopt=modelopt, factor=0.001 * (expert + 1)) for expert in range(3)]
    ups = [kind.make(f"{EXPERTS}.{n}.up_proj", (64, 48)) for n, kind in enumerate(kinds)]
    downs = [kind.make(f"{EXPERTS}.{n}.down_proj", (48, 64)) for n, kind in enumerate(kinds)]
    tensors = tensors_of(*ups, *downs)
    with requantized(
        store, tmp_path / "s", kinds[0], tensors, quant="int4", experts=experts
    ) as model:
        for weight in ups:
            assert_kept(model, weight)
        for weight in downs:
            if experts == "packed":
                assert_kept(model, weight)
            else:
                assert_quantized(model, weight.name, values_of(weight), "int8", group_size=64)


@pytest.mark.parametrize("kind", [COPIED["modelopt"], block_fp8()], ids=["nvfp4", "fp8"])
@pytest.mark.parametrize("options", [{"quant": "int4"}, {"rules": ["*=int4"]}])
def test_without_it_types_are_refused(tmp_path: Path, kind: Kind, options: dict[str, Any]) -> None:
    weight = kind.make(f"{LAYER}.mlp.up_proj", (8, 256))
    source = write_checkpoint(tmp_path / "s", weight.tensors, {**LLAMA_CONFIG, **kind.config})
    with pytest.raises(UnsupportedSourceError, match="quantized already") as caught:
        blobstore.plan_import(source, **options)
    assert "requantize=True" in str(caught.value.hint)


def test_a_draft_alone_can_be_requantized(tmp_path: Path, store: Store) -> None:
    source = write_checkpoint(tmp_path / "m", {"a.weight": normal("a", 64, 64)})
    options: dict[str, Any] = {"draft_quant": "int4", "requantize": True}
    blobstore.import_model(source, "m", store=store, draft=PYCODE, **options)
    with blobstore.open_model("m", store=store) as model:
        assert model["a.weight"].quant_type is None
        assert str(model["draft.model.layers.0.mlp.up_proj.weight"].quant_type) == "int4"
    measured = blobstore.measure_quality("m", source, store=store)
    assert [tensor.name for tensor in measured.tensors] == ["a.weight"]  # the draft has its own
