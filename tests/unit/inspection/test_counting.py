"""Logical counts: what is packed counts as what it stands for, whoever packed it.

The published count is the Hub's for RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16. Source:
huggingface/huggingface.js packages/hub/src/lib/parse-safetensors-metadata.spec.ts, August 2026.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.producers import COPIED, DECODED
from support.sparse import Tensor, Tensors, merged, write_sparse, write_sparse_folder

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


def test_a_blob_of_a_store_counts_as_a_file_too(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "m"), "m", store=store, quant="int4")
    found = inspect("m", store=store)
    places = {file.name: Path(file.place) for file in found.files}
    for tensor in found.tensors:
        (alone,) = inspect(places[tensor.file]).tensors
        facts = (alone.name, alone.shape, alone.packing)
        assert facts == (tensor.name, tensor.shape, tensor.packing)


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


def llama_8b(dtype: str, linear: Callable[[str, int, int], Tensors]) -> Tensors:
    """Return the tensors of a Llama 3 8B whose linear layers are stored by ``linear``."""
    hidden, inner, keys = 4096, 14336, 1024
    shapes = {
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden)),
        **dict.fromkeys(("self_attn.o_proj", "self_attn.q_proj"), (hidden, hidden)),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (keys, hidden)),
        "mlp.down_proj": (hidden, inner),
    }

    def parts() -> Iterator[Tensors]:
        words = ("lm_head", "model.embed_tokens")
        yield {f"{name}.weight": (dtype, (128_256, hidden)) for name in words}
        yield {"model.norm.weight": (dtype, (hidden,))}
        for layer in (f"model.layers.{number}" for number in range(32)):
            norms = ("input_layernorm", "post_attention_layernorm")
            yield {f"{layer}.{name}.weight": (dtype, (hidden,)) for name in norms}
            yield from (linear(f"{layer}.{name}", *shape) for name, shape in shapes.items())

    return merged(parts())


def gptq(name: str, rows: int, cols: int) -> dict[str, Tensor]:
    """Return the tensors of a linear layer of GPTQ with a bias."""
    return {
        f"{name}.bias": ("F16", (rows,)),
        f"{name}.g_idx": ("I32", (cols,)),
        f"{name}.qweight": ("I32", (cols // 8, rows)),
        f"{name}.qzeros": ("I32", (cols // 128, rows // 8)),
        f"{name}.scales": ("F16", (cols // 128, rows)),
    }


def test_a_published_model_counts_as_published(tmp_path: Path) -> None:
    tensors = llama_8b("F16", gptq)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    config = {"quantization_config": settings}
    found = inspect(write_sparse_folder(tmp_path / "with", tensors, config, shards=3))
    counts = {"F16": 1_052_315_648, "I32": 6_979_321_856}
    assert found.parameter_count == counts
    (one,) = found.quantizations
    assert (one.type, one.group_size, one.format, one.tensors) == ("int4", 128, "GPTQ", 224)
    assert found.notes == ()
    alone = inspect(write_sparse_folder(tmp_path / "without", tensors))
    assert alone.parameter_count == counts  # by the shapes, without a config.json
