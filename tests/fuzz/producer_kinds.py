"""What adapters, bitsandbytes' tensors and torch's files mean: the rest of producer_values.py.

Facts: bitsandbytes 0.50.2 functional.py `QuantState`, `dequantize_4bit`; peft 0.21.2
tuners/lora/layer.py; mlx_lm 0.32.2 tuner/lora.py, tuner/dora.py. torch itself reads its files.
"""

import io
import json
import math
import re
import struct
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from producer_values import (
    BF16,
    FLOATS,
    I8,
    LAYOUTS,
    U8,
    Array,
    ContradictionError,
    Module,
    Tensors,
    Values,
    is_count,
    need,
)
from producer_variants import Checkpoint
from safetensors.numpy import load_file
from support import FIXTURES

F32 = np.dtype(np.float32)
_DTYPES = {"bfloat16": BF16, "float16": np.dtype("f2"), "float32": F32}
_STATE = ".weight.quant_state.bitsandbytes__"

# bitsandbytes


def four_bits(module: Module) -> Values:
    """Read two codes a byte, the first in the high bits, with scales of blocks of all values."""
    kinds = [kind for kind in ("nf4", "fp4") if module.base + _STATE + kind in module.tensors]
    need(len(kinds) == 1, "one quant state")
    check_method(module, "load_in_8bit")
    raw, codes = module.take(_STATE + kinds[0], U8), module.take(".weight")
    try:
        outer_size: Any
        state: dict[str, Any] = json.loads(raw.tobytes())
        count, size = math.prod(state["shape"]), state["blocksize"]
        dtype, outer_size = _DTYPES[state["dtype"]], state.get("nested_blocksize")
    except (ValueError, KeyError, TypeError) as error:
        raise ContradictionError(str(error)) from error
    scales, table = module.take(".weight.absmax"), module.take(".weight.quant_map", F32)
    own = load_file(FIXTURES / f"producers/bitsandbytes-{_OWN[kinds[0]]}/model.safetensors")
    (known,) = (one for name, one in own.items() if name.endswith(".weight.quant_map"))
    need(table.shape == (16,) and np.allclose(table, known, rtol=0, atol=1e-6), "its table")
    need(len(state["shape"]) == 2 and codes.ndim == 2 and codes.shape[1] == 1, "not a matrix")
    halves = np.ascontiguousarray(codes).view(U8).reshape(-1)
    need(len(halves) == -(-count // 2 // codes.itemsize) * codes.itemsize, "codes do not fit")
    blocks = -(-count // size)
    need(scales.shape == (blocks,), "scales do not fit")
    if outer_size or module.base + ".weight.nested_absmax" in module.tensors:
        inner = module.take(".weight.nested_quant_map", F32)
        outer = module.take(".weight.nested_absmax", F32)
        need(scales.dtype == U8 and inner.shape == (256,) and is_count(outer_size), "nested scales")
        need(outer.shape == (-(-blocks // outer_size),), "outer scales do not fit")
        wide = np.repeat(outer.astype(np.float64), outer_size)[:blocks]
        with np.errstate(all="ignore"):
            scales = inner.astype(np.float64)[scales] * wide + state.get("nested_offset", np.nan)
    else:
        need(scales.dtype == F32, "scales are not floats")
    values = known.astype(np.float64)[np.stack((halves >> 4, halves & 15), 1).reshape(-1)[:count]]
    with np.errstate(all="ignore"):
        exact = values * np.repeat(scales.astype(np.float64), size)[:count]
    exact = exact.reshape(state["shape"])
    return Values(exact, dtype, np.abs(exact))


_OWN = {"nf4": "nf4", "fp4": "fp4-in-f16"}


def check_method(module: Module, other: str) -> None:
    method, own = module.method, module.config.get("quantization_config")
    need(method == "bitsandbytes" or not isinstance(method, str), "another method")
    need(not isinstance(own, dict) or own.get(other) is not True, "other bits")


def eight_bits(module: Module) -> Values:
    """Read LLM.int8: codes of rows with a scale each."""
    codes, scales = module.take(".weight", I8), module.take(".SCB", F32)
    order = module.get(".weight_format", U8)
    check_method(module, "load_in_4bit")
    need(order is None or (order.shape == () and not order), "another order")
    need(codes.ndim == 2 and scales.shape == codes.shape[:1] and codes.size, "scales do not fit")
    with np.errstate(all="ignore"):
        exact = codes.astype(np.float64) * scales.astype(np.float64)[:, None] / 127
    return Values(exact, BF16, np.abs(exact))


LAYOUTS[:0] = [
    (".weight", (U8, *FLOATS), ".weight.absmax", four_bits),
    (".weight", (I8,), ".SCB", eight_bits),
]

# Adapters

_PREFIX = "base_model.model."
_IGNORED = {
    *("base_model_name_or_path", "target_modules", "peft_version", "task_type", "inference_mode"),
    *("megatron_core", "qalora_group_size", "loftq_config", "num_layers", "keys", "dropout"),
}
_KNOWN = {
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
    *("fan_in_fan_out", "bias", "modules_to_save", "init_lora_weights"),
    *("fine_tune_type", "lora_parameters", "rank", "scale"),
}
_PEFT_ENDS: tuple[str, ...] = (
    *(".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B"),
    ".lora_magnitude_vector",
)


def adapted(
    base: dict[str, Values], tensors: Tensors, said: Mapping[str, Any]
) -> dict[str, Values]:
    """Return the base's values with an adapter's, as PEFT or mlx-lm merge them."""
    is_peft, kind = "peft_type" in said, said.get("fine_tune_type", "lora")
    given: Mapping[str, Any] = said if is_peft else said.get("lora_parameters") or {}
    if is_peft:
        need(said["peft_type"] == "LORA", "another method")
        need(not any(said[key] for key in said.keys() - _KNOWN - _IGNORED), "unknown settings")
        need(said.get("init_lora_weights") not in ("pissa", "loftq"), "another base")
        kind = "dora" if said.get("use_dora") else "lora"
    ends = _PEFT_ENDS if is_peft else (".lora_a", ".lora_b", ".m")
    result, modules = dict(base), defaultdict[str, Tensors](dict)
    for name, array in tensors.items():
        own = name.removeprefix(_PREFIX)
        need(array.dtype in FLOATS, f"{name} is {array.dtype}")
        end = next((end for end in ends if own.endswith(end)), None)
        if end is not None and kind != "full":
            modules[own.removesuffix(end)][end] = array.astype(np.float64)
            continue
        modules_to_save = said.get("modules_to_save") or []
        need(isinstance(modules_to_save, list), f"modules_to_save is {modules_to_save}")
        saved = [f"{module}." for module in modules_to_save]
        is_bias = said.get("bias", "none") != "none" and own.endswith(".bias")
        is_whole = kind == "full" if not is_peft else is_bias or ".base_layer." in own
        need(is_whole or (is_peft and any(one in name for one in saved)), f"{name} is unknown")
        place = found(result, own.replace(".base_layer.", "."))
        need(array.shape == result[place].exact.shape, f"{name} does not fit")
        exact = array.astype(result[place].dtype).astype(np.float64)  # as a model takes it
        result[place] = Values(exact, result[place].dtype, np.abs(exact))
    for module, parts in modules.items():
        name = f"{module}.weight"
        experts = re.escape(name).replace(r"\.switch_mlp\.", r"\.experts\.\d+\.")
        stack = [one for one in sorted(result) if "switch" in name and re.fullmatch(experts, one)]
        places = stack if stack and name not in result else [found(result, name)]
        pair: Any = (given.get("rank"), given.get("scale"))
        rank, scale = scale_of(module, given) if is_peft else pair
        need(is_count(rank) and isinstance(scale, int | float), f"rank {rank}, scale {scale}")
        shape = (*([len(stack)] if places is stack else []), *result[places[0]].exact.shape)
        change, terms = product(parts, shape, rank, said)
        magnitude = parts.get(".lora_magnitude_vector" if is_peft else ".m")
        need((magnitude is None) is (kind != "dora"), "magnitudes")
        for number, place in enumerate(places):
            at = number if places is stack else ...
            old = result[place]
            with np.errstate(all="ignore"):
                exact, most = old.exact + scale * change[at], old.terms + abs(scale) * terms[at]
                if magnitude is not None:
                    need(magnitude.shape == shape[:-1], "magnitudes do not fit")
                    factor = magnitude / np.linalg.norm(exact, axis=-1)
                    exact, most = exact * factor[:, None], most * np.abs(factor[:, None])
            result[place] = Values(exact, old.dtype, most)
    return result


def found(values: Mapping[str, Any], name: str) -> str:
    place = name if name in values else name.partition(".")[2]
    need(place in values, f"no {name}")
    return place


def scale_of(module: str, said: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a module's rank and scale: of the first pattern that its path ends with."""

    def first(key: str, usual: Any) -> Any:
        items = (said.get(key) or {}).items()
        return next((value for one, value in items if re.match(rf"(.*\.)?({one})$", module)), usual)

    rank, alpha = first("rank_pattern", said.get("r", 8)), said.get("lora_alpha", 8)
    alpha = first("alpha_pattern", alpha)
    need(is_count(rank) and type(alpha) in (int, float), f"rank {rank}, alpha {alpha}")
    return rank, alpha / (math.sqrt(rank) if said.get("use_rslora") else rank)


def product(
    parts: Tensors, shape: tuple[int, ...], rank: int, said: Mapping[str, Any]
) -> tuple[Array, Array]:
    """Return the product of two factors, of which the shapes say the order; and its terms."""
    flips = bool(said.get("fan_in_fan_out"))
    orders = (
        (".lora_B.weight", ".lora_A.weight", flips),
        (".lora_embedding_B", ".lora_embedding_A", True),
        (".lora_a", ".lora_b", len(shape) == 2),
        (".lora_a", ".lora_b", False),
        (".lora_b", ".lora_a", False),
    )
    need(len(shape) > 1, "not a matrix")
    for tall, wide, turned in orders:
        own = (*shape[:-2], *(shape[:-3:-1] if turned else shape[-2:]))
        factors = [parts[end] for end in (tall, wide) if end in parts]
        wanted = [(*own[:-1], rank), (*own[:-2], rank, own[-1])]
        others = parts.keys() - {tall, wide, ".m", ".lora_magnitude_vector"}
        if [one.shape for one in factors] == wanted and not others:
            with np.errstate(all="ignore"):
                # Rows and columns are rounded beside their largest values (`source/coding.py`).
                rows = np.abs(factors[0]).max(-1, keepdims=True)
                terms = rank * rows * np.abs(factors[1]).max(-2, keepdims=True)
                exact = factors[0] @ factors[1]
            return (exact.T, terms.T) if turned else (exact, terms)
    raise ContradictionError("factors do not fit")


# PyTorch's files


def torch_saved(tensors: Tensors, path: Path) -> None:
    """Save tensors as torch does."""
    torch.save({name: _as_torch(array) for name, array in tensors.items()}, path)


def _as_torch(array: Array) -> torch.Tensor:
    kind = getattr(torch, "float8_e8m0fnu" if "e8m0" in array.dtype.name else array.dtype.name)
    if not array.size:
        return torch.empty(array.shape, dtype=kind)
    raw = np.ascontiguousarray(array).reshape(-1).view(U8).copy()
    return torch.from_numpy(raw).view(kind).reshape(array.shape)


def torch_read(path: Path, one: Checkpoint) -> Tensors:
    """Return what torch reads, or what was written. Raises: ContradictionError.

    torch finds values by the header before them, blobstore by sizes and alignment, because a
    request for each header would cost seconds: if one is damaged, it reads what was written.
    """
    if one.flip is not None and _in_local_header(bytearray(path.read_bytes()), one.flip):
        return one.tensors
    try:
        stored = torch.load(path, weights_only=True)
        return {name: _as_array(tensor) for name, tensor in stored.items()}
    except Exception as error:
        if "invalid header" in str(error):
            return one.tensors
        raise ContradictionError(f"torch can't read it: {error}") from error


def _in_local_header(raw: bytearray, flip: float) -> bool:
    raw[at := int(flip * len(raw))] ^= 0x41
    for record in zipfile.ZipFile(io.BytesIO(raw)).infolist():
        begin = record.header_offset
        if begin <= at < begin + 30 + sum(struct.unpack_from("<HH", raw, begin + 26)):
            return True
    return False


def _as_array(tensor: torch.Tensor) -> Array:
    name = str(tensor.dtype).removeprefix("torch.")
    kind = np.dtype(getattr(ml_dtypes, name, None) or name)
    if not tensor.numel():
        return np.empty(tensor.shape, kind)
    array: Array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().view(kind)
    return array.reshape(tensor.shape)
