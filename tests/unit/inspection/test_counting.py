"""Logical counts: what is packed counts as what it stands for, whoever packed it."""

import math
from pathlib import Path

import pytest
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.producers import COPIED, DECODED
from support.sparse import Tensors, write_sparse

import blobstore
from blobstore.inspection.inspect import inspect
from blobstore.store.local.store import Store

PLAIN = {
    "model.norm.weight": normal("norm", 64),
    "model.embed_tokens.weight": normal("embed", 96, 64),
}


@pytest.mark.parametrize("shape", [(128, 256), (4, 64, 128)], ids=["matrix", "experts"])
def test_quantized_weights_count_as_their_values(tmp_path: Path, shape: tuple[int, ...]) -> None:
    for number, (name, kind) in enumerate({**COPIED, **DECODED}.items()):
        stored = [kind.make(f"model.layers.{layer}.mlp.up_proj", shape) for layer in range(2)]
        tensors = {**PLAIN, **stored[0].tensors, **stored[1].tensors}
        found = inspect(write_checkpoint(tmp_path / str(number), tensors, kind.config))
        plain = sum(array.size for array in PLAIN.values())
        assert found.parameters == plain + 2 * math.prod(shape), name
        packed = {tensor.name: tensor.shape for tensor in found.tensors if tensor.packing}
        assert packed == {one.name: shape for one in stored}
        (one,) = found.quantizations
        assert (one.tensors, one.parameters) == (2, 2 * math.prod(shape))
        assert one.type == ("fp8" if name in DECODED else stored[0].quant_type)
        assert one.group_size == (None if name in DECODED else stored[0].group_size)
        assert found.nbytes == sum(array.nbytes for array in tensors.values())
        assert found.notes == ()


@pytest.mark.parametrize(("quant", "experts"), [("int4", "packed"), ("nvfp4", "stacked")])
def test_a_stored_model_counts_as_its_source(
    store: Store, tmp_path: Path, quant: str, experts: str
) -> None:
    tensors = small_tensors() | {
        f"model.layers.1.mlp.experts.{number}.{name}.weight": normal(f"{number}{name}", 64, 128)
        for number in range(3)
        for name in ("down_proj", "up_proj")
    }
    source = write_checkpoint(tmp_path / "m", tensors | {"scale": normal("scale").reshape(())})
    blobstore.import_model(source, "m", store=store, quant=quant, experts=experts)
    found = inspect("m", store=store)
    count = sum(array.size for array in tensors.values())
    assert (found.parameters, inspect(source).parameters) == (count, count)
    assert quant in {one.type for one in found.quantizations}
    assert {one.format for one in found.quantizations} == {"Ollama"}
    with blobstore.open_model("m", store=store) as model:
        assert model.parameters == found.parameters
        facts = [(tensor.name, tensor.shape) for tensor in found.tensors]
        assert facts == [(tensor.name, tensor.shape) for tensor in model.values()]


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
