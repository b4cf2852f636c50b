"""Logical counts: what is packed counts as what it stands for, whoever packed it.

What can't be told is said.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support import QUANT_TYPES
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.producers import COPIED, DECODED, Kind
from support.sparse import Tensors, write_sparse

import blobstore
from blobstore.inspection.inspect import inspect
from blobstore.inspection.inspection import Inspection
from blobstore.store.local.store import Store

PLAIN = {
    "model.norm.weight": normal("norm", 64),
    "model.embed_tokens.weight": normal("embed", 96, 64),
}
BASE = "model.layers.0.mlp.up_proj"


def counted(folder: Path, tensors: dict[str, Any], config: Any = None) -> Inspection:
    return inspect(write_checkpoint(folder, tensors, config))


@pytest.mark.parametrize("name", [*COPIED, *DECODED])
@pytest.mark.parametrize("shape", [(128, 256), (4, 64, 128)], ids=["matrix", "experts"])
def test_a_quantized_weight_counts_as_its_values(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    kind: Kind = {**COPIED, **DECODED}[name]
    stored = [kind.make(BASE, shape), kind.make("model.layers.1.mlp.up_proj", shape)]
    tensors = {**PLAIN, **stored[0].tensors, **stored[1].tensors}
    found = counted(tmp_path, tensors, kind.config)
    expected = sum(array.size for array in PLAIN.values()) + sum(one.values.size for one in stored)
    assert found.parameters == expected
    assert {tensor.name: tensor.shape for tensor in found.tensors if tensor.packing} == {
        one.name: shape for one in stored
    }
    (one,) = found.quantizations
    assert (one.tensors, one.parameters) == (2, 2 * math.prod(shape))
    assert one.type == ("fp8" if name in DECODED else stored[0].quant_type)
    assert one.group_size == (None if name in DECODED else stored[0].group_size)
    assert found.nbytes == sum(array.nbytes for array in tensors.values())
    assert found.notes == ()


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_a_stored_model_counts_as_its_source(
    store: Store, tmp_path: Path, quant_type: str, experts: str
) -> None:
    tensors = small_tensors() | {
        f"model.layers.1.mlp.experts.{number}.{name}.weight": normal(f"{number}{name}", 64, 128)
        for number in range(3)
        for name in ("down_proj", "up_proj")
    }
    source = write_checkpoint(tmp_path / "m", tensors | {"scale": normal("scale").reshape(())})
    blobstore.import_model(source, "m", store=store, quant=quant_type, experts=experts)
    found = inspect("m", store=store)
    assert (
        found.parameters
        == inspect(source).parameters
        == sum(array.size for array in tensors.values())
    )
    assert quant_type in {one.type for one in found.quantizations}
    assert {one.format for one in found.quantizations} == {"Ollama"}
    with blobstore.open_model("m", store=store) as model:
        assert model.parameters == found.parameters
        assert [tensor.name for tensor in found.tensors] == list(model)
        assert [tensor.shape for tensor in found.tensors] == [
            tensor.shape for tensor in model.values()
        ]


def test_a_blob_of_a_store_is_counted_as_a_file_too(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "m"), "m", store=store, quant="int4")
    for tensor in inspect("m", store=store).tensors:
        place = next(
            file.place for file in inspect("m", store=store).files if file.name == tensor.file
        )
        (alone,) = inspect(Path(place)).tensors
        assert (alone.name, alone.shape, alone.packing) == (
            tensor.name,
            tensor.shape,
            tensor.packing,
        )


def test_buffers_masks_and_positions_count_as_they_are(tmp_path: Path) -> None:
    """GPT-NeoX: a mask of U8, and rank-0 tensors, which the Hub's counts leave out."""
    tensors: Tensors = {
        "attention.bias": ("U8", (1, 1, 2048, 2048)),
        "attention.masked_bias": ("F16", ()),
        "attention.rotary_emb.inv_freq": ("F16", (12,)),
        "embeddings.position_ids": ("I64", (1, 514)),
        "empty": ("F32", (0, 3)),
    }
    found = inspect(write_sparse(tmp_path / "m.safetensors", tensors))
    assert found.parameter_count == {"F16": 12, "I64": 514, "U8": 4_194_304}
    assert found.notes == ()
    assert len(found.tensors) == 5
