"""A gpt-oss checkpoint (MXFP4) is stored without loss, and other programs agree on it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx import core as mx
from mlx_lm import utils
from support import PYCODE
from support.checkpoints import normal, safetensors_bytes

import blobstore
from blobstore.formats.quant import QuantType
from blobstore.store.local.store import Store

WIDTH, EXPERTS, WORDS, LAYERS = 64, 4, 4096, 2
DOWN = "model.layers.0.mlp.experts.down_proj"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": LAYERS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "vocab_size": WORDS,
    "rms_norm_eps": 1e-5,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 128,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "layer_types": ["sliding_attention", "full_attention"],
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn"],
    },
}


def layer(number: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return one layer's tensors, its experts in blocks of 32 values."""
    prefix = f"model.layers.{number}."
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (32, WIDTH),
        "self_attn.v_proj": (32, WIDTH),
        "mlp.router": (EXPERTS, WIDTH),
    }
    tensors = {f"{prefix}self_attn.sinks": normal("sinks", 4)}
    for name, shape in shapes.items():
        tensors[f"{prefix}{name}.weight"] = normal(f"{prefix}{name}", *shape)
        if len(shape) == 2:
            tensors[f"{prefix}{name}.bias"] = normal(f"{prefix}{name}.bias", shape[0])
    random = np.random.default_rng(number)
    for name, rows in (("gate_up_proj", 2 * WIDTH), ("down_proj", WIDTH)):
        expert, blocks = f"{prefix}mlp.experts.{name}", (EXPERTS, rows, WIDTH // 32)
        tensors[f"{expert}_blocks"] = random.integers(0, 256, (*blocks, 16), dtype=np.uint8)
        tensors[f"{expert}_scales"] = random.integers(110, 122, blocks, dtype=np.uint8)
        tensors[f"{expert}_bias"] = normal(name, EXPERTS, rows)
    return tensors


@pytest.fixture
def tensors() -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a checkpoint of two layers."""
    outer = {
        name: normal(name, WORDS, WIDTH) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    outer["model.norm.weight"] = normal("model.norm.weight", WIDTH)
    return outer | {
        name: tensor for number in range(LAYERS) for name, tensor in layer(number).items()
    }


@pytest.fixture
def checkpoint(tmp_path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    """The checkpoint's folder."""
    folder = tmp_path / "gpt-oss-tiny"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PYCODE / name, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_experts_are_stored_without_loss(
    checkpoint: Path, store: Store, experts: str, tensors: dict[str, np.ndarray[Any, Any]]
) -> None:
    blobstore.import_model(checkpoint, "m", store=store, experts=experts)
    blocks, scales = tensors[f"{DOWN}_blocks"], tensors[f"{DOWN}_scales"]
    # huggingface/transformers v4.57 integrations/mxfp4.py `convert_moe_packed_tensors`: the low
    # half of a byte comes first.
    codes = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], axis=-1).reshape(EXPERTS, WIDTH, WIDTH)
    wanted = codes * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, axis=-1)
    with blobstore.open_model("m", store=store) as model:
        tensor = model[f"{DOWN}.weight"]
        assert tensor.quant_type is QuantType.MXFP4
        np.testing.assert_array_equal(tensor.dequantize().view(np.uint32), wanted.view(np.uint32))


def test_logits_are_those_of_mlx_lm(checkpoint: Path, store: Store) -> None:
    blobstore.import_model(checkpoint, "m", store=store)
    tokens = mx.array([[1, 2, 3, 4]])
    ours = blobstore.mlx_lm.load("m", store=store)[0](tokens)
    theirs = utils.load_model(checkpoint)[0](tokens)
    assert mx.array_equal(ours, theirs)
    assert float(mx.max(mx.abs(theirs))) > 0


@pytest.mark.lab  # PyTorch and transformers take seconds to import
def test_a_dequantized_export_is_what_transformers_makes_of_the_blocks(
    checkpoint: Path, store: Store, tmp_path: Path
) -> None:
    blobstore.import_model(checkpoint, "m", store=store)
    blobstore.export_model(
        "m", tmp_path / "out", store=store, dequantize="bfloat16", max_shard_size="source"
    )
    import torch
    from transformers.utils.quantization_config import Mxfp4Config

    theirs, _ = load(checkpoint, quantization_config=Mxfp4Config(dequantize=True))
    ours, info = load(tmp_path / "out")
    assert {key: names for key, names in info.items() if names} == {}
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(tensor, ours[name])] == []


def load(folder: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of transformers' model of a folder, and missing or unused ones."""
    import torch
    from transformers import GptOssForCausalLM

    network, info = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **options
    )
    return network.state_dict(), info
