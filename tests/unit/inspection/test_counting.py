"""Logical counts: what is packed counts as what it stands for, whoever packed it.

Published counts are those of the Hub for the repository that is named. Source: huggingface/
huggingface.js packages/hub/src/lib/parse-safetensors-metadata.spec.ts, August 2026.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    """Return the tensors of a Llama 3 whose linear layers are stored by ``linear``."""
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
    """RedHatAI's Meta-Llama-3.1-8B-Instruct-quantized.w4a16: every layer has a bias."""
    return {
        f"{name}.bias": ("F16", (rows,)),
        f"{name}.g_idx": ("I32", (cols,)),
        f"{name}.qweight": ("I32", (cols // 8, rows)),
        f"{name}.qzeros": ("I32", (cols // 128, rows // 8)),
        f"{name}.scales": ("F16", (cols // 128, rows)),
    }


def bitsandbytes(name: str, rows: int, cols: int) -> dict[str, Tensor]:
    """unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit."""
    blocks = rows * cols // 64
    return {
        f"{name}.weight": ("U8", (rows * cols // 2, 1)),
        f"{name}.weight.absmax": ("U8", (blocks,)),
        f"{name}.weight.nested_absmax": ("F32", (blocks // 256,)),
        f"{name}.weight.nested_quant_map": ("F32", (256,)),
        f"{name}.weight.quant_map": ("F32", (16,)),
        f"{name}.weight.quant_state.bitsandbytes__nf4": ("U8", (190,)),
    }


def gpt_oss_20b() -> Tensors:
    hidden, queries, keys = 2880, 4096, 512
    linear = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}
    linear["o"] = (hidden, queries)

    def parts() -> Iterator[Tensors]:
        words = ("lm_head", "model.embed_tokens")
        yield {f"{name}.weight": ("BF16", (201_088, hidden)) for name in words}
        yield {"model.norm.weight": ("BF16", (hidden,))}
        for layer in (f"model.layers.{number}" for number in range(24)):
            norms = ("input_layernorm", "post_attention_layernorm")
            yield {f"{layer}.{name}.weight": ("BF16", (hidden,)) for name in norms}
            yield {
                f"{layer}.self_attn.sinks": ("BF16", (64,)),
                f"{layer}.mlp.router.weight": ("BF16", (32, hidden)),
                f"{layer}.mlp.router.bias": ("BF16", (32,)),
            }
            for name, (rows, cols) in linear.items():
                yield {f"{layer}.self_attn.{name}_proj.weight": ("BF16", (rows, cols))}
                yield {f"{layer}.self_attn.{name}_proj.bias": ("BF16", (rows,))}
            for name, rows in (("gate_up_proj", 2 * hidden), ("down_proj", hidden)):
                experts = f"{layer}.mlp.experts.{name}"
                yield {f"{experts}_bias": ("BF16", (32, rows))}
                yield {f"{experts}_blocks": ("U8", (32, rows, hidden // 32, 16))}
                yield {f"{experts}_scales": ("U8", (32, rows, hidden // 32))}

    return merged(parts())


PUBLISHED: dict[str, tuple[Tensors, dict[str, Any], dict[str, int], str]] = {
    "gptq": (
        llama_8b("F16", gptq),
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"F16": 1_052_315_648, "I32": 6_979_321_856},
        "int4/128 GPTQ 224",
    ),
    "bitsandbytes": (
        llama_8b("BF16", bitsandbytes),
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"BF16": 1_050_939_392, "U8": 6_979_321_856},
        "nf4/64 bitsandbytes 224",
    ),
    "gpt-oss-20b": (
        gpt_oss_20b(),
        {"quant_method": "mxfp4"},
        {"BF16": 1_804_459_584, "U8": 19_110_297_600},
        "mxfp4/32 gpt-oss MXFP4 48",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_quantized_models_count_as_published(tmp_path: Path, name: str) -> None:
    tensors, settings, counts, quantization = PUBLISHED[name]
    config = {"quantization_config": settings}
    found = inspect(write_sparse_folder(tmp_path / "with", tensors, config, shards=3))
    assert found.parameter_count == counts
    (one,) = found.quantizations
    assert f"{one.type}/{one.group_size} {one.format} {one.tensors}" == quantization
    assert found.notes == ()
    alone = inspect(write_sparse_folder(tmp_path / "without", tensors))
    assert alone.parameter_count == counts  # by the shapes, without a config.json
