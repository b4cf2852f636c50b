"""--requantize: a quantized source is dequantized, and quantized like a float source."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import QUANT_TYPES
from support.arrays import bits
from support.checkpoints import LLAMA_CONFIG, write_checkpoint
from support.producers import COPIED, Kind, Stored, block_fp8
from support.weights import assert_same_parts, parts_of

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


@pytest.mark.parametrize(("number", "kind"), [*enumerate(KINDS.values())], ids=KINDS)
def test_a_matrix(store: Store, tmp_path: Path, kind: Kind, number: int) -> None:
    quant = QUANT_TYPES[number % len(QUANT_TYPES)]
    weight = kind.make(f"{LAYER}.self_attn.o_proj", (8, 256))
    with requantized(store, tmp_path / "s", kind, weight.tensors, quant=quant) as model:
        assert list(model) == [weight.name]
        assert_quantized(model, weight.name, values_of(weight), quant)
        assert model.config.file_type == quant


@pytest.mark.parametrize("kind", FEW.values(), ids=FEW)
def test_what_the_policy_leaves_keeps_codes(store: Store, tmp_path: Path, kind: Kind) -> None:
    kept = kind.make("model.embed_tokens", (8, 256))
    other = kind.make(f"{LAYER}.mlp.up_proj", (8, 256))
    with requantized(store, tmp_path / "s", kind, tensors_of(kept, other), quant="int4") as model:
        assert_quantized(model, other.name, values_of(other), "int4")
        stored = model[kept.name].numpy()
        if isinstance(stored, QuantizedArray):
            assert stored.quant_type.value == kept.quant_type
            assert [*map(bits, parts_of(stored))] == [*map(bits, kept.arrays.values())]
        else:
            assert (stored.dtype, len(kept.arrays)) == (BF16, 0)
        np.testing.assert_array_equal(model[kept.name].dequantize(), kept.values)


@pytest.mark.parametrize(
    ("kind", "experts"),
    [("mlx int4/64 bfloat16", "packed"), ("modelopt", "stacked"), ("fp8", "stacked")],
)
def test_experts(store: Store, tmp_path: Path, kind: str, experts: str) -> None:
    weights = [FEW[kind].make(f"{EXPERTS}.{expert}.up_proj", (8, 256)) for expert in range(3)]
    options: dict[str, Any] = {"quant": "nvfp4", "global_scale": True, "experts": experts}
    with requantized(store, tmp_path / "s", FEW[kind], tensors_of(*weights), **options) as model:
        if experts == "packed":
            for weight in weights:
                assert_quantized(model, weight.name, values_of(weight), "nvfp4", global_scale=True)
        else:
            stack = np.stack([values_of(weight) for weight in weights])
            name = f"{EXPERTS}.up_proj.weight"
            assert_quantized(model, name, stack, "nvfp4", global_scale=True)


def test_without_it_a_type_is_refused(tmp_path: Path) -> None:
    kind = COPIED["modelopt"]
    weight = kind.make(f"{LAYER}.mlp.up_proj", (8, 256))
    source = write_checkpoint(tmp_path / "s", weight.tensors, {**LLAMA_CONFIG, **kind.config})
    both: list[dict[str, Any]] = [{"quant": "int4"}, {"target_bpw": 4.6}]
    for options in both:
        with pytest.raises(UnsupportedSourceError, match="quantized already"):
            blobstore.plan_import(source, **options)
