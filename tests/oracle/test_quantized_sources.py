"""Quantized sources keep their values bit for bit, by an independent reference.

The references are in tests/support/producers.py. Copied weights are compared twice: the stored
arrays byte for byte, and the values that `dequantize` gives. Block FP8 is compared where it stays
BF16 and where it becomes mxfp8.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.arrays import plain
from support.checkpoints import LLAMA_CONFIG, normal, safetensors_bytes, write_checkpoint
from support.producers import Kind, Stored, block_fp8, gpt_oss, mlx_affine, mlx_float, nvfp4

import blobstore
from blobstore import QuantizedArray
from blobstore.model.loader import Model
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
LAYER = "model.layers.0"
NORM = f"{LAYER}.input_layernorm.weight"
KINDS = {
    "mlx int4/32": mlx_affine(4, 32, BF16),
    "mlx int8/64, float16": mlx_affine(8, 64, np.float16),
    "mlx int8/128": mlx_affine(8, 128),
    "mlx nvfp4": mlx_float("nvfp4"),
    "mlx mxfp4": mlx_float("mxfp4"),
    "mlx mxfp8": mlx_float("mxfp8"),
    "compressed-tensors": nvfp4(modelopt=False, scalar=False),
    "modelopt": nvfp4(modelopt=True),
    "gpt-oss": gpt_oss(),
}
BLOCKS = {"weights": {"strategy": "block", "block_structure": [128, 128]}}
GROUPS = {"group_0": BLOCKS, "group_1": {"weights": None}}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": GROUPS}
FP8_KINDS = {
    "scale_inv, float32": block_fp8(),
    "compressed-tensors": Kind(block_fp8("_scale", BF16).make, {"quantization_config": COMPRESSED}),
}


def imported(store: Store, folder: Path, kind: Kind, *weights: Stored, **options: Any) -> Model:
    tensors = {NORM: normal("norm", 64)}
    for weight in weights:
        tensors |= weight.tensors
    source = write_checkpoint(folder, tensors, {**LLAMA_CONFIG, **kind.config})
    blobstore.import_model(source, "m", store=store, **options)
    return blobstore.open_model("m", store=store, verify=True)


def assert_copied(model: Model, weight: Stored) -> None:
    """Fail unless the model holds exactly the weight's arrays, and gives back its values."""
    tensor = model[weight.name]
    stored = tensor.numpy()
    assert isinstance(stored, QuantizedArray)
    assert (str(tensor.quant_type), tensor.group_size) == (weight.quant_type, weight.group_size)
    parts = (stored.weight, stored.scale, stored.bias, stored.global_scale)
    suffixes = ("", ".scale", ".bias", ".global_scale")
    found = {suffix: one for suffix, one in zip(suffixes, parts, strict=True) if one is not None}
    assert described(found) == described(weight.arrays)
    assert_values(tensor.dequantize(), weight.values)


def described(arrays: Mapping[str, Array]) -> dict[str, Any]:
    return {key: (one.dtype, one.shape, one.tobytes()) for key, one in arrays.items()}


def assert_values(found: Array, wanted: Array) -> None:
    """Fail unless both are float32 of one shape with the same bits."""
    assert (found.dtype, found.shape, wanted.dtype) == (np.float32, wanted.shape, np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_matrix_and_stacked_experts_are_copied(store: Store, tmp_path: Path, kind: Kind) -> None:
    matrix = kind.make(f"{LAYER}.self_attn.o_proj", (6, 256))
    stack = kind.make(f"{LAYER}.mlp.switch_mlp.up_proj", (3, 2, 128))
    for profile in ("default", "ollama"):
        with imported(store, tmp_path / "s", kind, matrix, stack, profile=profile) as model:
            assert set(model) == {NORM, matrix.name, stack.name}  # and no scale of activations
            assert_copied(model, matrix)
            assert_copied(model, stack)
            assert plain(model[NORM]).tobytes() == normal("norm", 64).tobytes()
            assert model.config.file_type == matrix.quant_type


@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize("kind", ["mlx int4/32", "modelopt"])
def test_numbered_experts_are_copied(store: Store, tmp_path: Path, kind: str, experts: str) -> None:
    group, made = f"{LAYER}.mlp.experts", KINDS[kind].make
    down = [made(f"{group}.{expert}.down_proj", (2, 256)) for expert in range(11)]
    up = [made(f"{group}.{expert}.up_proj", (4, 128)) for expert in range(11)]
    is_stacked = experts == "stacked" and ".global_scale" not in up[0].arrays
    with imported(store, tmp_path / "s", KINDS[kind], *down, *up, experts=experts) as model:
        assert len(model) == (3 if is_stacked else 23)
        for name, members in (("down", down), ("up", up)):
            if is_stacked:
                values = model[f"{group}.{name}_proj.weight"].dequantize()
                assert_values(values, np.stack([weight.values for weight in members]))
        for weight in () if is_stacked else (*down, *up):
            assert_copied(model, weight)


SHAPES = [(130, 200), (128, 136), (1, 8), (300, 1), (257, 129)]


@pytest.mark.parametrize("kind", FP8_KINDS.values(), ids=FP8_KINDS)
def test_fp8_becomes_mxfp8_or_bf16(store: Store, tmp_path: Path, kind: Kind) -> None:
    weight = kind.make(f"{LAYER}.self_attn.v_proj", (130, 160))
    others = [kind.make(f"{LAYER}.{n}.self_attn.o_proj", shape) for n, shape in enumerate(SHAPES)]
    for profile in ("default", "ollama"):
        with imported(store, tmp_path / "s", kind, weight, *others, profile=profile) as model:
            assert_quantized(model, weight.name, weight.values)
            for other in others:
                assert plain(model[other.name]).dtype == BF16
                assert_values(model[other.name].dequantize(), other.values)
            assert model.config.file_type == "mxfp8"


def test_a_source_of_two_producers(store: Store, tmp_path: Path) -> None:
    fp8 = block_fp8().make(f"{LAYER}.mlp.up_proj", (64, 64))
    packed = KINDS["modelopt"].make(f"{LAYER}.mlp.down_proj", (6, 64))
    with imported(store, tmp_path / "s", block_fp8(), fp8, packed) as model:
        assert_quantized(model, fp8.name, fp8.values)
        assert_copied(model, packed)
        assert model.config.file_type == ""


@pytest.mark.parametrize("kind", ["mlx mxfp4", "mlx int8/128", "compressed-tensors", "gpt-oss"])
def test_a_bare_file_whose_shapes_allow_one_type(store: Store, tmp_path: Path, kind: str) -> None:
    weight = KINDS[kind].make(f"{LAYER}.mlp.up_proj", (3, 256))
    (tmp_path / "m.safetensors").write_bytes(safetensors_bytes(weight.tensors))
    blobstore.import_model(tmp_path / "m.safetensors", "m", store=store)
    with blobstore.open_model("m", store=store) as model:
        assert_copied(model, weight)


def assert_quantized(model: Model, name: str, values: Array) -> None:
    """Fail unless the model holds the mxfp8 of the BF16 ``values``."""
    wanted, stored = blobstore.quantize(values.astype(BF16), "mxfp8"), model[name].numpy()
    assert isinstance(stored, QuantizedArray)
    assert stored.quantization == wanted.quantization
    np.testing.assert_array_equal(stored.weight, wanted.weight)
    np.testing.assert_array_equal(stored.scale, wanted.scale)
