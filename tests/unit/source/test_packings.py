"""Weights that are packed in forms which are not imported are counted too, or noted as unclear."""

import math
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import BF16, safetensors_bytes
from support.packed import COLS, PACKED, ROWS, UNCLEAR
from support.sparse import Tensors, write_sparse_folder

from blobstore.inspection.inspect import inspect

BASE = "model.layers.0.mlp.up_proj"


def test_what_is_not_imported_is_counted(tmp_path: Path) -> None:
    plain = {"model.norm.weight": ("BF16", (64,))}
    for name, (tensors, config, quantization, shape) in PACKED.items():
        named = {f"{BASE}{suffix}": tensor for suffix, tensor in tensors.items()}
        found = inspect(write_sparse_folder(tmp_path / name, {**plain, **named}, config))
        (one,) = found.quantizations
        (weight,) = [tensor for tensor in found.tensors if tensor.packing]
        size = "" if one.group_size is None else f"/{one.group_size}"
        assert f"{one.type}{size} {one.format}" == quantization, name
        assert (weight.name, weight.shape) == (f"{BASE}.weight", shape), name
        assert set(weight.parts) == named.keys(), name
        assert found.parameters == 64 + math.prod(shape), name
        assert found.nbytes == 128 + weight.nbytes, name
        assert found.notes == (), name


def test_what_is_unclear_is_counted_as_stored_and_noted(tmp_path: Path) -> None:
    for name, (tensors, config, says, _) in UNCLEAR.items():
        named = {f"{base}{suffix}": one for base in "abc" for suffix, one in tensors.items()}
        found = inspect(write_sparse_folder(tmp_path / name, named, config))
        assert found.parameters == 3 * sum(math.prod(shape) for _, shape in tensors.values()), name
        assert found.quantizations == (), name
        (note,) = found.notes
        assert note.startswith("3 tensors"), name
        assert says in note, name


def test_modules_of_their_own(tmp_path: Path) -> None:
    """MLX's ``quantization`` may say something else of a module, or that it is not quantized."""
    tensors: Tensors = {
        **{f"a{suffix}": tensor for suffix, tensor in PACKED["mlx 6 bits"][0].items()},
        **{f"b{suffix}": tensor for suffix, tensor in PACKED["mlx 3 bits"][0].items()},
        "c.weight": ("BF16", (ROWS, COLS)),
    }
    settings = {"group_size": 64, "bits": 6, "b": {"group_size": 64, "bits": 3}, "c": False}
    folder = write_sparse_folder(tmp_path, tensors, {"quantization": settings})
    for place in (folder, folder / "model.safetensors"):
        found = inspect(place)
        assert [str(tensor.packing) for tensor in found.tensors] == ["int6/64", "int3/64", "None"]
        assert found.parameters == 3 * ROWS * COLS


@pytest.mark.parametrize("text", ["{", '{"quantization": {"bits": 7, "group_size": 64}}'])
def test_a_config_that_can_not_be_used_is_said(tmp_path: Path, text: str) -> None:
    tensors, *_ = PACKED["mlx 5 bits"]  # in groups of 64: no other type has these shapes
    named = {f"{BASE}{suffix}": tensor for suffix, tensor in tensors.items()}
    folder = write_sparse_folder(tmp_path, named)
    (folder / "config.json").write_text(text)
    found = inspect(folder)
    assert found.parameters == ROWS * COLS
    (note,) = found.notes
    assert note.startswith("config.json")


def test_a_damaged_blob_is_counted_as_stored_and_said(tmp_path: Path) -> None:
    arrays = {"x": np.zeros((4, 8), np.uint32), "x.scale": np.zeros((4, 3), BF16)}
    path = tmp_path / "blob"
    path.write_bytes(safetensors_bytes(arrays, {"quant_type": "int4", "group_size": "32"}))
    found = inspect(path)
    assert found.parameter_count == {"BF16": 12, "U32": 32}
    assert "'x'" in found.notes[0]
