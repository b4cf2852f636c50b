"""Counts that others have published, of headers that are made from the architectures' dimensions.

Source: huggingface/huggingface.js packages/hub/src/lib/parse-safetensors-metadata.spec.ts, August
2026; each is the Hub's answer for the repository that is named, and the total is that of the
unquantized model, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.nginx import Nginx, nginx
from support.published import COUNTS, write
from support.sparse import Tensor, Tensors, merged, write_sparse_folder

from blobstore.inspection.inspect import inspect

Linear = Callable[[str, int, int], Tensors]
"""A name, outputs and inputs → the tensors that store such a layer."""

LLAMA_8B = {"layers": 32, "hidden": 4096, "inner": 14336, "keys": 1024, "vocabulary": 128_256}
LLAMA_70B = {"layers": 80, "hidden": 8192, "inner": 28672, "keys": 1024, "vocabulary": 128_256}


def llama(
    linear: Linear, dtype: str, *, layers: int, hidden: int, inner: int, keys: int, vocabulary: int
) -> Tensors:
    """Return the tensors of a Llama 3 whose linear layers are stored by ``linear``."""
    shapes = {
        "mlp.down_proj": (hidden, inner),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (keys, hidden),
    }

    def parts() -> Iterator[Tensors]:
        yield {
            f"{name}.weight": (dtype, (vocabulary, hidden))
            for name in ("lm_head", "model.embed_tokens")
        }
        yield {"model.norm.weight": (dtype, (hidden,))}
        for layer in (f"model.layers.{number}" for number in range(layers)):
            yield {
                f"{layer}.{name}_layernorm.weight": (dtype, (hidden,))
                for name in ("input", "post_attention")
            }
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


def packed(name: str, rows: int, cols: int) -> dict[str, Tensor]:
    """RedHatAI/Llama-3.3-70B-Instruct-quantized.w4a16: compressed-tensors with activation order."""
    return {
        f"{name}.weight_g_idx": ("I32", (cols,)),
        f"{name}.weight_packed": ("I32", (rows, cols // 8)),
        f"{name}.weight_scale": ("BF16", (rows, cols // 128)),
        f"{name}.weight_shape": ("I64", (2,)),
    }


def gpt_oss(layers: int, experts: int) -> Tensors:
    """Return the tensors of openai/gpt-oss-20b or -120b."""
    hidden, queries, keys, vocabulary = 2880, 4096, 512, 201_088

    def parts() -> Iterator[Tensors]:
        yield {
            f"{name}.weight": ("BF16", (vocabulary, hidden))
            for name in ("lm_head", "model.embed_tokens")
        }
        yield {"model.norm.weight": ("BF16", (hidden,))}
        for layer in (f"model.layers.{number}" for number in range(layers)):
            yield {
                f"{layer}.{name}_layernorm.weight": ("BF16", (hidden,))
                for name in ("input", "post_attention")
            }
            yield {f"{layer}.self_attn.sinks": ("BF16", (64,))}
            yield {
                f"{layer}.mlp.router.weight": ("BF16", (experts, hidden)),
                f"{layer}.mlp.router.bias": ("BF16", (experts,)),
            }
            for name, rows, cols in (
                ("q", queries, hidden),
                ("k", keys, hidden),
                ("v", keys, hidden),
                ("o", hidden, queries),
            ):
                yield {f"{layer}.self_attn.{name}_proj.weight": ("BF16", (rows, cols))}
                yield {f"{layer}.self_attn.{name}_proj.bias": ("BF16", (rows,))}
            for name, rows in (("gate_up_proj", 2 * hidden), ("down_proj", hidden)):
                yield {f"{layer}.mlp.experts.{name}_bias": ("BF16", (experts, rows))}
                yield {
                    f"{layer}.mlp.experts.{name}_blocks": ("U8", (experts, rows, hidden // 32, 16))
                }
                yield {f"{layer}.mlp.experts.{name}_scales": ("U8", (experts, rows, hidden // 32))}

    return merged(parts())


W4A16 = {
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}},
    "format": "pack-quantized",
}
PUBLISHED: dict[str, tuple[Tensors, dict[str, Any], dict[str, int], str]] = {
    "gptq": (
        llama(gptq, "F16", **LLAMA_8B),
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"F16": 1_052_315_648, "I32": 6_979_321_856},
        "int4/128 GPTQ 224",
    ),
    "bitsandbytes": (
        llama(bitsandbytes, "BF16", **LLAMA_8B),
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"BF16": 1_050_939_392, "U8": 6_979_321_856},
        "nf4/64 bitsandbytes 224",
    ),
    "compressed-tensors": (
        llama(packed, "BF16", **LLAMA_70B),
        {"quant_method": "compressed-tensors", **W4A16},
        {"BF16": 2_102_665_216, "I32": 68_451_041_280},
        "int4/128 compressed-tensors 560",
    ),
    "gpt-oss-20b": (
        gpt_oss(24, 32),
        {"quant_method": "mxfp4"},
        {"BF16": 1_804_459_584, "U8": 19_110_297_600},
        "mxfp4/32 gpt-oss MXFP4 48",
    ),
    "gpt-oss-120b": (
        gpt_oss(36, 128),
        {"quant_method": "mxfp4"},
        {"BF16": 2_167_371_072, "U8": 114_661_785_600},
        "mxfp4/32 gpt-oss MXFP4 72",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_quantized_models_count_as_published(tmp_path: Path, name: str) -> None:
    tensors, settings, counts, quantization = PUBLISHED[name]
    folder = write_sparse_folder(
        tmp_path / name, tensors, {"quantization_config": settings}, shards=3
    )
    found = inspect(folder)
    assert found.parameter_count == counts
    assert found.parameters == sum(counts.values())
    assert [
        f"{one.type}/{one.group_size} {one.format} {one.tensors}" for one in found.quantizations
    ] == [quantization]
    assert found.notes == ()


@pytest.mark.parametrize("name", ["gptq", "bitsandbytes", "gpt-oss-20b"])
def test_shapes_say_it_where_no_config_does(tmp_path: Path, name: str) -> None:
    tensors, _, counts, _ = PUBLISHED[name]
    assert inspect(write_sparse_folder(tmp_path, tensors)).parameter_count == counts


@pytest.mark.parametrize("repository", COUNTS)
def test_published_checkpoints_count_as_published(tmp_path: Path, repository: str) -> None:
    found = inspect(write(repository, tmp_path))
    assert found.parameter_count == COUNTS[repository]
    assert (found.quantizations, found.notes) == ((), ())


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    """A web server with these repositories, laid out as the Hub has them."""
    root = tmp_path_factory.mktemp("hub")
    for repository in COUNTS:
        write(repository, root / repository / "resolve" / "main")
    with nginx(tmp_path_factory.mktemp("nginx"), root) as running:
        yield running


@pytest.mark.lab
@pytest.mark.parametrize("repository", COUNTS)
def test_they_do_from_a_web_server(hub: Nginx, repository: str) -> None:
    hub.requests()
    found = inspect(
        f"hf://{repository}" if "/" in repository else f"{hub.url}/{repository}/resolve/main",
        endpoint=hub.url,
    )
    assert found.parameter_count == COUNTS[repository]
    assert found.notes == ()
    # An index, its shards, and for integers that may be packed config.json, which is not there; or
    # what is no index first.
    assert len(hub.requests()) <= 2 * len(found.files) + 1
