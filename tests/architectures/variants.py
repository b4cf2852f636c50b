"""Checkpoints changed after they were made: quantized, with draft heads, with odd configs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from architectures.converted import convert

Change = Callable[[Path], None]
"""Changes a checkpoint in a folder."""

_BLOCK = 128
_LARGEST_E4M3 = 448.0
_KEPT = re.compile(r"embed|lm_head|norm|\.gate\.weight$|conv|router|indexer\.weights_proj")
_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [_BLOCK, _BLOCK],
}


def block_fp8(folder: Path) -> None:
    """Store matrices as DeepSeek does: F8_E4M3 and a ``weight_scale_inv`` for 128 by 128 of them.

    Source: deepseek-ai/DeepSeek-V3 inference/kernel.py `weight_dequant`.
    """
    import torch

    weights = _read(folder)
    for name, value in list(weights.items()):
        if value.ndim == 2 and not _KEPT.search(name):
            rows, columns = (-(-size // _BLOCK) for size in value.shape)
            padded = torch.zeros(rows * _BLOCK, columns * _BLOCK)
            padded[: value.shape[0], : value.shape[1]] = value.float()
            blocks = padded.view(rows, _BLOCK, columns, _BLOCK)
            scales = blocks.abs().amax(dim=(1, 3)) / _LARGEST_E4M3
            codes = (blocks / scales[:, None, :, None]).reshape(padded.shape)
            codes = codes[: value.shape[0], : value.shape[1]]
            weights[name] = codes.to(torch.float8_e4m3fn).contiguous()
            weights[f"{name}_scale_inv"] = scales
    _write(folder, weights)
    _configure(folder, {"quantization_config": _FP8})


def gpt_oss_mxfp4(folder: Path) -> None:
    """Store experts as gpt-oss: ``X_blocks`` ``[experts, rows, groups, 16]``, ``X_scales``."""
    import mlx.core as mx
    import numpy as np
    import torch

    weights = _read(folder)
    for name in [name for name in weights if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        rows = mx.array(weights.pop(name).float().transpose(-1, -2).contiguous().numpy())
        codes, scales, *_ = mx.quantize(rows, group_size=32, bits=4, mode="mxfp4")
        blocks = codes.view(mx.uint8).reshape(*scales.shape, 16)
        weights[f"{name}_blocks"] = torch.from_numpy(np.array(blocks))
        weights[f"{name}_scales"] = torch.from_numpy(np.array(scales))
    _write(folder, weights)
    _configure(folder, {"quantization_config": {"quant_method": "mxfp4"}})


def next_layer(folder: Path) -> None:
    """Add DeepSeek V3's layer for the token after the next, which the config does not count."""
    weights, config = _read(folder), _config(folder)
    number = config["num_hidden_layers"]
    last, more = f"model.layers.{number - 1}.", f"model.layers.{number}."
    for name in [name for name in weights if name.startswith(last)]:
        weights[name.replace(last, more)] = weights[name].clone()
    hidden = weights["model.norm.weight"]
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{more}{norm}.weight"] = hidden.clone()
    square = weights["model.embed_tokens.weight"][: len(hidden)]
    weights[f"{more}eh_proj.weight"] = square.repeat(1, 2)
    _write(folder, weights)
    _configure(folder, {"num_nextn_predict_layers": 1})


def quantized_by_mlx(folder: Path) -> None:
    """Quantize the checkpoint as ``mlx_lm.convert -q`` does: 4 bits in groups of 64."""
    source = folder.rename(folder.with_name("floats"))
    convert(source, folder, "int4")


def _read(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    weights: dict[str, Any] = load_file(folder / "model.safetensors")
    return weights


def _write(folder: Path, weights: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _configure(folder: Path, more: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps({**_config(folder), **more}, indent=2))


CHANGED: dict[str, tuple[str, Change]] = {
    "deepseek_v3, FP8": ("deepseek_v3", block_fp8),
    "deepseek_v32, FP8": ("deepseek_v32", block_fp8),
    "glm4_moe, MTP": ("glm4_moe", next_layer),
    "gpt_oss, mxfp4": ("gpt_oss", gpt_oss_mxfp4),
    "llama, MLX int4": ("llama", quantized_by_mlx),
    "mimo_v2_flash, FP8": ("mimo_v2_flash", block_fp8),
    "minimax_m2, FP8": ("minimax_m2", block_fp8),
}
"""The row that it begins with, and the change, by the name of the row."""
