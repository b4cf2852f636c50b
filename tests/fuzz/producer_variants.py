"""Small checkpoints of each producer, and changes of their tensors and of config.json.

A row of `SEEDS` is a producer: a change to any of its checkpoints is a variant. Folders of
fixtures/producers are found by the beginnings of their names; the others are made here.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import safetensors
from producer_values import BF16, E4M3, E5M2, E8M0, I8, I32, I64, U8, U32, Array, Tensors
from support import FIXTURES

BASE = "model.layers.0.mlp.down_proj"
OTHER = "model.layers.0.mlp.up_proj"
_DTYPES = {"BF16": BF16, "F16": np.dtype("f2"), "F32": np.dtype("f4"), "F8_E4M3": E4M3}
_DTYPES |= {"F8_E5M2": E5M2, "F8_E8M0": E8M0, "U8": U8, "I8": I8, "I32": I32, "I64": I64}
_DTYPES |= {"U32": U32}


@dataclass
class Checkpoint:
    """Tensors in their order, config.json, and what was changed.

    ``base``: of an adapter, whose config is adapter_config.json. ``torch``: torch.save writes it,
    and the byte at ``flip``, a part of the file, is changed.
    """

    tensors: Tensors
    config: dict[str, Any]
    base: Path | None = None
    torch: bool = False
    flip: float | None = None
    changes: list[str] = field(default_factory=list)
    harmless: bool = True


# Checkpoints

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256}


def recorded(*prefixes: str) -> Iterator[Checkpoint]:
    for folder in sorted((FIXTURES / "producers").iterdir()):
        if f"{folder.name}/".startswith(prefixes) and folder.is_dir():
            tensors = tensors_of(folder / "model.safetensors")
            yield Checkpoint(tensors, json.loads((folder / "config.json").read_text()))


def tensors_of(path: Path) -> Tensors:
    return {
        name: np.frombuffer(one["data"], _DTYPES[one["dtype"]]).reshape(one["shape"])
        for name, one in sorted(safetensors.deserialize(path.read_bytes()))
    }


def adapters(producer: str) -> Iterator[Checkpoint]:
    for path in sorted((FIXTURES / "adapters").glob(f"{producer}-*/adapter*.safetensors")):
        base = path.parents[1] / f"base-{(path.parent / 'base.txt').read_text().strip()}"
        said = json.loads((path.parent / "adapter_config.json").read_text())
        yield Checkpoint(tensors_of(path), said, base)


def torch_files() -> Iterator[Checkpoint]:
    for one in (*recorded("gptq", "compressed-tensors-int4-g128", "bitsandbytes-nf4/"), *fp8()):
        yield Checkpoint(one.tensors, one.config, torch=True)


def made(config: dict[str, Any], **tensors: Array) -> Checkpoint:
    named = {f"{BASE}.{name}": array for name, array in tensors.items()}
    return Checkpoint(named, {**_LLAMA, **config})


def quantized(method: str, **settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **settings}}


def mlx() -> Iterator[Checkpoint]:
    weights = mx.random.normal((40, 256), key=mx.random.key(0))
    for bits, size in ((2, 64), (3, 32), (4, 64), (5, 64), (6, 128), (8, 32)):
        words, *parts = map(np.array, mx.quantize(weights, group_size=size, bits=bits))
        scales, biases = (part.astype(BF16) for part in parts)
        config = {"quantization": {"group_size": size, "bits": bits}}
        yield made(config, weight=words, scales=scales, biases=biases)


def fp4() -> Iterator[Checkpoint]:
    """Yield FP4 as DeepSeek-V4, ModelOpt and compressed-tensors store it."""
    random_ = np.random.default_rng(0)
    codes = random_.integers(0, 256, (40, 128), np.uint8)
    scales = random_.integers(118, 126, (40, 8), np.uint8).view(E8M0)
    config = quantized("fp8", weight_block_size=[128, 128])
    yield made(config, weight=codes.view(I8), scale=scales)
    scale = random_.uniform(0.5, 2, (40, 16)).astype(E4M3)
    config, factor = quantized("modelopt", quant_algo="NVFP4"), np.full((), 0.01, np.float32)
    yield made(config, weight=codes, weight_scale=scale, weight_scale_2=factor)
    group = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"targets": ["Linear"], "weights": group}}
    form, divisor = "nvfp4-pack-quantized", np.full(1, 100, np.float32)
    config = quantized("compressed-tensors", format=form, config_groups=groups)
    yield made(config, weight_packed=codes, weight_scale=scale, weight_global_scale=divisor)


def fp8() -> Iterator[Checkpoint]:
    """Yield FP8 as DeepSeek, FBGEMM, ModelOpt and GPTQModel store it."""
    random_ = np.random.default_rng(0)
    codes = random_.standard_normal((40, 256)).astype(np.float32).astype(E4M3)
    for suffix, shape, dtype, said in (
        ("weight_scale_inv", (1, 2), "f4", {"weight_block_size": [128, 128]}),
        ("weight_scale_inv", (3, 4), BF16, {"weight_block_size": [16, 64]}),
        ("weight_scale", (40, 1), "f4", {"method": "fbgemm_fp8"}),
        ("weight_scale", (), "f4", {"method": "modelopt", "quant_algo": "FP8"}),
        ("weight_scale_inv", (40, 1), "f4", {"weight_scale_semantics": "inverse"}),
        ("scale", (3, 2), E8M0, {"weight_block_size": [16, 128]}),
    ):
        scale = np.asarray(random_.uniform(0.01, 0.1, shape)).astype(np.float32).astype(dtype)
        settings: dict[str, Any] = {"method": "fp8", "activation_scheme": "dynamic", **said}
        yield made(quantized(**settings), weight=codes, **{suffix: scale})


SEEDS: dict[str, Callable[[], Iterator[Checkpoint]]] = {
    "compressed-tensors pack-quantized": lambda: recorded(
        *(f"compressed-tensors-int{kind}" for kind in ("3-", "4-g", "4-m", "4-r", "6-", "8-g"))
    ),
    "compressed-tensors int-quantized": lambda: recorded(
        "compressed-tensors-int4-bytes", "compressed-tensors-int8-bytes"
    ),
    "compressed-tensors float-quantized": lambda: recorded("compressed-tensors-fp8"),
    "compressed-tensors mxfp": lambda: recorded("compressed-tensors-mxfp"),
    "AWQ": lambda: recorded("awq"),
    "GPTQ": lambda: recorded("gptq"),
    "AutoRound": lambda: recorded("auto-round"),
    "FP8": fp8,
    "FP4": fp4,
    "MLX": mlx,
    "bitsandbytes": lambda: recorded("bitsandbytes"),
    "PEFT": lambda: adapters("peft"),
    "mlx-lm": lambda: adapters("mlx"),
    "torch.save": torch_files,
}
"""The checkpoints of each producer."""

# Changes of tensors

Random = random.Random
_COMPANIONS = (
    *("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "scale"),
    *("weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale", "qweight"),
    *("qzeros", "scales", "biases", "g_idx", "bias", "input_scale", "k_scale", "weight.absmax"),
    *("SCB", "weight.quant_state.bitsandbytes__fp4", "weight.nested_absmax", "weight.quant_map"),
    *("lora_A.weight", "lora_embedding_B", "lora_magnitude_vector", "lora_a", "lora_b", "m"),
)
_CASTS = {I32: ("i8", "u4", "f4"), U8: ("i1", "i4"), I8: ("u1", "i4", BF16), U32: ("i4", "i8")}
_CASTS |= {BF16: ("f2", "f4", "i4"), np.dtype("f2"): (BF16, "f4"), np.dtype("f4"): (BF16, "f2")}
_CASTS |= {E4M3: (BF16, "f4", E5M2), I64: ("i4",), E8M0: ("f4", BF16)}
_VIEWS: list[list[Any]] = [["i4", "u4", "f4"], [BF16, "f2", "i2"], ["u1", "i1", E4M3, E8M0, E5M2]]
_NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-8, 6e4, -6e4, 3e38, np.inf, np.nan)


Change = Callable[[Random, Checkpoint], str]


def pick(rng: Random, one: Checkpoint) -> str:
    return rng.choice([*one.tensors])


def remade(change: Callable[[Random, Array], Array]) -> Change:
    """Return the change of a tensor by ``change``."""

    def changed(rng: Random, one: Checkpoint) -> str:
        old = one.tensors[name := pick(rng, one)]
        one.tensors[name] = new = change(rng, old)
        forms = (f"{array.dtype} {list(array.shape)}" for array in (old, new))
        return f"{change.__name__} of {name}, {' → '.join(forms)}"

    return changed


@remade
def transpose(_: Random, array: Array) -> Array:
    return np.ascontiguousarray(array.T)


@remade
def resize(rng: Random, array: Array) -> Array:
    if not array.ndim:
        return array.reshape(1)
    axis, more = rng.randrange(array.ndim), rng.random() < 0.5
    last = array.take([-1], axis) if array.shape[axis] else array
    return np.concatenate([array, last], axis) if more else np.delete(array, -1, axis)


@remade
def reshape(rng: Random, array: Array) -> Array:
    shapes = [(1, *array.shape), (*array.shape, 1), (-1,), (array.size, 1), (-1, 2)]
    return array.reshape(rng.choice(shapes if array.size % 2 == 0 else shapes[:4]))


@remade
def first_only(rng: Random, array: Array) -> Array:
    """Leave one number, or one line."""
    shape = rng.choice([(), (1,), (1, 1)])
    cut = array.reshape(-1)[:1].reshape(shape) if array.size else array
    return cut if rng.random() < 0.7 or not array.ndim else array[:1]


@remade
def cast(rng: Random, array: Array) -> Array:
    kind = np.dtype(rng.choice(_CASTS.get(array.dtype, ("f4",))))
    with np.errstate(all="ignore"):
        return array.astype(np.float32).astype(kind)


@remade
def view(rng: Random, array: Array) -> Array:
    """Change the dtype, and keep the bytes."""
    kinds = next((kinds for kinds in _VIEWS if array.dtype in kinds), ["i8"])
    kind = np.dtype(rng.choice([one for one in kinds if one != array.dtype] or ["i8"]))
    return array.view(kind if kind != np.dtype("i2") else BF16)


@remade
def renumber(rng: Random, array: Array) -> Array:
    """Change some numbers, or bytes."""
    array = np.array(array, order="C")
    flat = array.reshape(-1)
    if not flat.size:
        return array
    at = rng.randrange(flat.size)
    if flat.dtype.kind in "iu" or rng.random() < 0.3:
        raw = flat[at:].view(np.uint8)
        count = rng.choice([1, flat.itemsize, len(raw)])
        raw[:count] = np.frombuffer(rng.randbytes(count), np.uint8)
    else:
        with np.errstate(all="ignore"):
            flat[at] = np.float32(rng.choice(_NUMBERS))
    return array


def drop(rng: Random, one: Checkpoint) -> str:
    del one.tensors[name := pick(rng, one)]
    return f"without {name}"


def rename(rng: Random, one: Checkpoint) -> str:
    """Rename a tensor, or copy it."""
    name = pick(rng, one)
    new = f"{name.rpartition('.')[0]}.{rng.choice(_COMPANIONS)}"
    one.tensors[new] = one.tensors[name] if rng.random() < 0.4 else one.tensors.pop(name)
    return f"{name} → {new}"


def copy_module(rng: Random, one: Checkpoint) -> str:
    """Copy or rename a module, perhaps without one of its tensors."""
    new = rng.choice([OTHER, "lm_head", "model.embed_tokens", "x", "model.layers.0.mlp.é"])
    names = [name for name in one.tensors if name.startswith(BASE)]
    for name in names:
        one.tensors[new + name.removeprefix(BASE)] = one.tensors[name]
    if rng.random() < 0.3:
        for name in names:
            del one.tensors[name]
    return f"{BASE} → {new}, {drop(rng, one) if rng.random() < 0.3 else 'whole'}"


def add(rng: Random, one: Checkpoint) -> str:
    module = pick(rng, one).rpartition(".")[0]
    name, shape = f"{module}.{rng.choice(_COMPANIONS)}", rng.choice([(), (1,), (40, 1), (256,)])
    one.tensors[name] = np.ones(shape, rng.choice(["f4", BF16, "i4", "u1"]))
    return f"with {name} {one.tensors[name].dtype} {list(shape)}"


def exchange(rng: Random, one: Checkpoint) -> str:
    first, second = pick(rng, one), pick(rng, one)
    one.tensors[first], one.tensors[second] = one.tensors[second], one.tensors[first]
    return f"{first} ↔ {second}"


TENSOR_CHANGES = (
    *(drop, transpose, resize, resize, reshape, first_only, cast, view, rename, copy_module),
    *(add, renumber, renumber, exchange),
)

# Changes of config.json

_ANY: tuple[Any, ...] = (None, True, False, 0, -1, 1, 4.0, "4", "", [], {}, 2**40, [[4]])
_SIZES = (16, 32, 64, 128, 256, -1, 0, 48, 1, 3)
_BITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
_BLOCKS = ([128, 128], [16, 64], [64, 16], [1, 128], [1, 32], [0, 0], [16], "16x64", [2**40, 1])
KEYS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("bits", "num_bits", "w_bit"), _BITS),
    **dict.fromkeys(("group_size", "q_group_size"), _SIZES),
    **dict.fromkeys(("sym", "symmetric", "desc_act", "zero_point", "dynamic"), (True, False)),
    "quant_method": (
        *("gptq", "awq", "compressed-tensors", "fp8", "auto-round", "intel/auto-round"),
        *("modelopt", "bitsandbytes", "mxfp4", "hqq", "fbgemm_fp8"),
    ),
    "checkpoint_format": ("gptq", "gptq_v2", "marlin", "gptq_p"),
    "packing_format": (
        *("auto_round", "auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:gptqmodel"),
        "auto_round:llm_compressor",
    ),
    "version": ("gemm", "GEMM", "gemv", "gemv_fast", "marlin", "0.12.2"),
    "strategy": ("tensor", "channel", "group", "block", "token", "tensor_group"),
    "type": ("int", "float"),
    "format": ("pack-quantized", "int-quantized", "float-quantized", "mixed-precision", "mixfp4"),
    "actorder": ("weight", "static", "group", "dynamic", True),
    **dict.fromkeys(("block_structure", "weight_block_size"), _BLOCKS),
    "targets": (["Linear"], [BASE], ["re:.*down_proj$"], ["re:.*q_proj"], ["re:(a+)+$"], "Linear"),
    "weight_scale_semantics": ("inverse", "multiply"),
    "transform_config": ({}, {"config_groups": {"a": 1}}),
    "dynamic": ({}, {"-:.*down.*": {}}, {".*down.*": {"bits": 8}}, {"+:.*up.*": {"bits": 8}}),
    "extra_config": ({}, {BASE: {"bits": 8}}, {BASE: {"group_size": 32}}, {OTHER: {"bits": 8}}),
    "mode": ("affine", "mxfp4", "nvfp4", "mxfp8"),
    BASE: (False, True, {"bits": 4, "group_size": 64}, {"bits": 8, "group_size": 32}),
    "ignore": ([], ["lm_head"], ["re:.*norm"]),
    "config_groups": ({}, {"g": {}}, {"g": {"targets": ["Linear"], "weights": {"num_bits": 4}}}),
    "quantization_config": ({}, {"bits": 4, "group_size": 64}),
    "quantization": ({"bits": 4, "group_size": 64}, {"bits": 8, "group_size": 32}),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "use_dora", "fan_in_fan_out"), (True, False)),
    **dict.fromkeys(("r", "rank"), (1, 2, 3, 4, 5, 8)),
    **dict.fromkeys(("lora_alpha", "scale"), (1, 16, 0, -2.5, 1e30)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, {"q_proj": 4}, {".*proj": 5})),
    "use_rslora": (True, False, None),
    "modules_to_save": (None, ["lm_head"], ["norm"], ["q_proj"]),
    "peft_type": ("LORA", "IA3"),
    "fine_tune_type": ("lora", "dora", "full"),
}
"""Values that the keys of config.json may have."""


def objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from objects(item)


def settings_of(one: Checkpoint) -> list[dict[str, Any]]:
    whole, *inner = objects(one.config)
    return [whole, whole, *inner] if one.base else inner or [whole]


def set_key(rng: Random, one: Checkpoint) -> str:
    """Change a setting, or add one."""
    there = rng.choice(settings_of(one))
    own = [key for key in there if key in KEYS and not isinstance(there[key], dict)]
    key = rng.choice(own) if own and rng.random() < 0.7 else rng.choice([*KEYS])
    there[key] = copy.deepcopy(rng.choice(KEYS[key] if rng.random() < 0.8 else _ANY))
    return f"{key} = {there[key]!r}"


def drop_key(rng: Random, one: Checkpoint) -> str:
    if not (there := rng.choice(settings_of(one))):
        return "nothing"
    del there[key := rng.choice([*there])]
    return f"without {key}"


def of_another(rng: Random, one: Checkpoint) -> str:
    """Take the settings of another checkpoint, perhaps of another program."""
    name = rng.choice([*SEEDS])
    other = rng.choice(seeds(name))
    for key in ("quantization", "quantization_config"):
        one.config.pop(key, None)
        if key in other.config:
            one.config[key] = copy.deepcopy(other.config[key])
    return f"config.json of {name}"


def move_settings(rng: Random, one: Checkpoint) -> str:
    """Take settings away, or put them under another key."""
    said = one.config.pop("quantization_config", None)
    said = one.config.pop("quantization", said) if said is None else said
    place = rng.choice(["nowhere", "quantization", "quantization_config", "text_config"])
    if place == "text_config":
        one.config[place] = {"quantization_config": said}
    elif place != "nowhere":
        one.config[place] = said
    return f"settings → {place}"


def second_group(rng: Random, one: Checkpoint) -> str:
    found = (item["config_groups"] for item in objects(one.config) if item.get("config_groups"))
    groups = next(found, None)
    if not isinstance(groups, dict) or not groups:
        return set_key(rng, one)
    group = copy.deepcopy(next(iter(groups.values())))
    groups["group_1"] = group
    weights = group.get("weights") if isinstance(group, dict) else None
    if isinstance(weights, dict):
        key = rng.choice(["num_bits", "group_size", "strategy", "symmetric"])
        weights[key] = rng.choice(KEYS[key])
    return f"a second group, {group}"


CONFIG_CHANGES = (*[set_key] * 4, drop_key, of_another, move_settings, second_group)


def reorder(rng: Random, one: Checkpoint) -> str:
    names = [*one.tensors]
    rng.shuffle(names)
    one.tensors = {name: one.tensors[name] for name in names}
    if one.base:
        return "another order"
    one.tensors["model.norm.weight"] = np.ones(256, BF16)
    one.tensors[f"{BASE}.input_scale"] = np.ones((), np.float32)
    one.config["note"] = {"bits": 3}
    return "another order"


_made: dict[str, list[Checkpoint]] = {}


def seeds(producer: str) -> list[Checkpoint]:
    return _made.setdefault(producer, [*SEEDS[producer]()])


def variant(producer: str, number: int) -> Checkpoint:
    """Return a variant of a producer: always the same for a number."""
    rng = Random(f"{producer}.{number}")
    seed = rng.choice(seeds(producer))
    one = replace(seed, tensors=dict(seed.tensors), config=copy.deepcopy(seed.config), changes=[])
    if rng.random() < 0.2:
        one.changes.append(reorder(rng, one))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3])):
        if not one.tensors:
            break
        change = rng.choice(rng.choice([TENSOR_CHANGES, CONFIG_CHANGES]))
        one.changes.append(change(rng, one))
        one.harmless = False
    if one.torch and rng.random() < 0.3:
        one.flip, one.harmless = rng.random(), False
    return one
