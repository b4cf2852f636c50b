"""Checkpoints of other libraries (``fixtures/producers/make.py``): values, and contradictions."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from producer_values import E5M2
from producer_variants import recorded, seeds
from producers import check
from safetensors.torch import load_file, save_file
from support import FIXTURES
from support.arrays import bits

from blobstore import Store, import_model, open_model, plan_import, run_plan
from blobstore.errors import UnsupportedSourceError
from blobstore.formats.dtypes import DType
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import SourceReaders, SourceWeight

PRODUCERS = FIXTURES / "producers"
CASES = sorted(path.name for path in PRODUCERS.iterdir() if path.is_dir())
BASE = "model.layers.0.mlp.down_proj"
WEIGHT = f"{BASE}.weight"
Tensors = dict[str, torch.Tensor]
Settings = dict[str, Any]


def expected(case: str) -> torch.Tensor:
    return load_file(PRODUCERS / case / "dequantized.safetensors")[WEIGHT]


def values_of(weight: SourceWeight, step: int = 2**20) -> np.ndarray[Any, Any]:
    """Return a weight's values, read in pieces of ``step``."""
    readers, starts = SourceReaders(), range(0, weight.elements, step)
    pieces = [readers.values(weight, at, min(step, weight.elements - at)).copy() for at in starts]
    readers.close()
    return np.concatenate(pieces)


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_library(case: str) -> None:
    """To the bit, also in pieces that begin and end within rows, bytes and blocks."""
    (weight,) = read_inventory(PRODUCERS / case).weights
    values = expected(case)
    assert (weight.name, weight.shape) == (WEIGHT, tuple(values.shape))
    step = 3 * 51 if case == "bitsandbytes-nf4-odd" else 128 * 9
    assert bits(values_of(weight, step)) == bits(values)


HELD = {
    "auto-round-3-plain": "int4/32",
    "auto-round-8-auto_gptq": "int8/128",
    "awq-g128-zeros": "int4/128",
    "compressed-tensors-int3-g32-zeros": "int4/32",
    "compressed-tensors-int4-matrix": "int4/128",
    "compressed-tensors-int6-g64": "int8/64",
    "compressed-tensors-int8-bytes-rows-zeros": "int8/128",
    "compressed-tensors-mxfp4": "mxfp4/32",
    "compressed-tensors-mxfp8": "mxfp8/32",
    "gptq-2-g64": "int4/64",
    "gptq-v2-8-g32": "int8/32",
}
"""Cases whose codes are kept, and the types that hold them."""


@pytest.mark.parametrize("case", HELD)
def test_codes_are_kept(case: str, store: Store) -> None:
    """So values differ from the library's by its own rounding, and by that of a bias."""
    import_model(PRODUCERS / case, "m", store=store)
    with open_model("m", store=store) as model:
        tensor = model[WEIGHT]
        assert tensor.type_text == HELD[case]
        read, values = tensor.dequantize(), expected(case).double().numpy()
    unit = 2.0**-8 if expected(case).dtype is torch.bfloat16 else 2.0**-11
    assert np.abs(read - values).max() <= 2 * unit * np.abs(values).max()


@pytest.mark.parametrize(
    ("case", "most"),
    [
        ("awq-g128-zeros", 2.0**-12 * 15),
        ("compressed-tensors-int4-g32-zeros", 2.0**-9 * 15),
        ("compressed-tensors-int8-bytes-rows-zeros", 2.0**-9 * 255),
        ("compressed-tensors-int4-g128", 0),
    ],
)
def test_the_largest_difference_of_kept_codes_is_said(case: str, most: float, store: Store) -> None:
    plan = plan_import(PRODUCERS / case)
    said = [note for note in plan.notes if "zero points" in note]
    assert bool(said) is bool(most)
    assert all(f" {most:.2g} of the step" in note for note in said)
    run_plan(plan, "m", store)
    (weight,) = plan.inventory.weights
    scale = load_file(PRODUCERS / case / "model.safetensors")[weight.companions[".scale"].name]
    exact = values_of(replace(weight, dtype=DType.F32))
    with open_model("m", store=store) as model:
        difference = np.abs(model[WEIGHT].dequantize().reshape(-1) - exact).max()
    assert difference <= (most + 2.0**-20) * float(scale.float().max())


@pytest.mark.parametrize("case", ["compressed-tensors-int4-g16", "gptq-4-g64-permuted"])
def test_groups_that_no_type_has_become_floats(case: str, store: Store) -> None:
    import_model(PRODUCERS / case, "m", store=store)
    with open_model("m", store=store) as model:
        assert bits(model[WEIGHT].numpy()) == bits(expected(case))


def test_fp8_of_any_granularity_becomes_mxfp8(store: Store) -> None:
    for case in ("matrix", "rows", "g128", "blocks"):
        import_model(PRODUCERS / f"compressed-tensors-fp8-{case}", case, store=store)
        with open_model(case, store=store) as model:
            assert model[WEIGHT].type_text == "mxfp8/32"


def test_what_fp8_loses_is_said() -> None:
    """Once, and only if no type is asked for."""
    source = PRODUCERS / "compressed-tensors-fp8-rows"
    (note,) = plan_import(source).notes
    assert note.startswith("weights of FP8 (1) become mxfp8")
    assert "--quant int8 --method search" in note
    assert plan_import(source, quant="int8", method="search", requantize=True).notes == ()
    assert plan_import(PRODUCERS / "compressed-tensors-mxfp8").notes == ()


def test_scales_that_are_left_out_are_counted(tmp_path: Path) -> None:
    names = ("mlp.down_proj.input_scale", "self_attn.k_scale", "self_attn.v_scale")
    added = adding({f"model.layers.0.{name}": torch.ones(1) for name in names})
    source = rewritten("compressed-tensors-fp8-rows", tmp_path / "source", added)
    left_out = plan_import(source).coverage.tensors.left_out
    assert [(one.name, one.reason.partition(",")[0], one.count) for one in left_out] == [
        ("*.input_scale", "activation scales", 1),
        ("*.k_scale", "scales of a cache of keys and values", 1),
        ("*.v_scale", "scales of a cache of keys and values", 1),
    ]


def test_biases_of_zeros_that_gptq_adds_are_left_out(tmp_path: Path) -> None:
    """mlx-lm's networks have no place for them; other biases stay."""
    for number in (0, 1):
        added = {f"{BASE}.bias": torch.full((64,), number).half()}
        folder = rewritten("gptq-4-g128", tmp_path / f"{number}", adding(added))
        names = [weight.name for weight in read_inventory(folder).weights]
        assert names == [f"{BASE}.bias"] * number + [WEIGHT]
    (left_out,) = plan_import(tmp_path / "0").coverage.tensors.left_out
    assert (left_out.name, left_out.count) == ("*.bias", 1)


def test_other_types_have_to_be_asked_for_twice(store: Store) -> None:
    source = PRODUCERS / "compressed-tensors-int4-g128"
    with pytest.raises(UnsupportedSourceError, match="quantized already"):
        import_model(source, "m", store=store, quant="int8")
    import_model(source, "m", store=store, quant="int8", requantize=True)
    with open_model("m", store=store) as model:
        assert model[WEIGHT].type_text.startswith("int8")


Change = Callable[[Tensors, Settings], Any]


def rewritten(case: str, folder: Path, change: Change) -> Path:
    tensors = load_file(PRODUCERS / case / "model.safetensors")
    config = json.loads((PRODUCERS / case / "config.json").read_text())
    change(tensors, config["quantization_config"])
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def adding(added: Tensors) -> Change:
    return lambda tensors, _: tensors.update(added)


@pytest.mark.parametrize("case", ["fp8-matrix", "fp8-rows", "fp8-g128", "fp8-blocks", "mxfp8"])
def test_fp8_with_five_bits_of_exponent(case: str, tmp_path: Path) -> None:
    """As the decoder of tests/fuzz has it; no program is known that writes it."""
    (one,) = recorded(f"compressed-tensors-{case}/")
    codes = np.arange(40 * 256, dtype=np.uint16) % 0x7B
    one.tensors[WEIGHT] = codes.astype(np.uint8).view(E5M2).reshape(40, 256)
    assert check(one, tmp_path, imports=True) == "equal"


def test_other_floats_and_mlx_bits(tmp_path: Path) -> None:
    """FP8 of DeepSeek, FBGEMM, ModelOpt and GPTQModel; FP4 of DeepSeek-V4; 2 to 8 bits of MLX."""
    held = {
        "FP8": ["mxfp8/32"] * 6,
        "FP4": ["mxfp4/32", "nvfp4/16", "nvfp4/16"],
        "MLX": ["int4/64", "int4/32", "int4/64", "int8/64", "int8/128", "int8/32"],
    }
    for producer, types in held.items():
        for number, (one, type_text) in enumerate(zip(seeds(producer), types, strict=True)):
            (folder := tmp_path / f"{producer}-{number}").mkdir()
            assert check(one, folder, imports=True) == "equal"
            with open_model("m", store=Store(folder / "store")) as model:
                assert model[WEIGHT].type_text == type_text


def say(**settings: Any) -> Change:
    return lambda _, said: said.update(settings)


def rules(key: str, name: str) -> Change:
    """The module's own bits and groups are those of a rule, others are the general ones."""

    def ruled(_: Tensors, said: Settings) -> None:
        own = {name: said.pop(name) for name in ("bits", "group_size")}
        said.update({"bits": 8, "group_size": 32, key: {name: own, "other": {"bits": 16}}})

    return ruled


def groups(*targets: str) -> Change:
    """The module's own group of config.json has the first target, groups of int8 the others."""

    def grouped(_: Tensors, said: Settings) -> None:
        (own,) = said["config_groups"].values()
        other = {**own, "weights": {**own["weights"], "num_bits": 8, "group_size": 64}}
        made = ({**(own if one == targets[0] else other), "targets": [one]} for one in targets)
        said["config_groups"] = {f"group_{number}": one for number, one in enumerate(made)}

    return grouped


def without_order(tensors: Tensors, said: Settings) -> None:
    del tensors[f"{BASE}.g_idx"], said["checkpoint_format"]


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("awq-g128-zeros", say(checkpoint_format="gemm")),
        ("awq-g128-zeros", say(quant_method="auto-round", packing_format="auto_round:auto_awq")),
        ("auto-round-4-auto_gptq", lambda _, said: said.pop("packing_format")),
        ("gptq-4-g128", say(packing_format="auto_round")),
        ("auto-round-3-plain", rules("extra_config", BASE)),
        ("auto-round-3-plain", rules("extra_config", r"model\\..*down_proj")),
        ("gptq-4-g128", rules("dynamic", "+:.*down_proj")),
        ("gptq-4-g128", without_order),
        ("compressed-tensors-int4-g128", groups("Linear", "re:.*v_proj")),
        ("compressed-tensors-int4-g128", groups("re:.*down_proj", "Linear")),
        ("compressed-tensors-int4-g128", groups(BASE, "Linear", "re:.*v_proj")),
    ],
)
def test_same_by_settings(case: str, change: Change, tmp_path: Path) -> None:
    (weight,) = read_inventory(rewritten(case, tmp_path / "source", change)).weights
    assert bits(values_of(weight)) == bits(expected(case))


@pytest.mark.parametrize(
    ("name", "shape", "scales", "said"),
    [
        # Stacked experts, whose inputs come first (transformers 5.24.0 integrations/fbgemm_fp8.py).
        ("layers.0.mlp.experts.gate_up_proj", (3, 64, 96), (3, 1, 96), "fbgemm_fp8"),
        # Blocks of 128, which are not named (nvidia-modelopt 0.47.0).
        ("layers.0.mlp.down_proj.weight", (200, 384), (2, 1, 3, 1), "fp8_pb_wo"),
    ],
)
def test_fp8_by_columns_and_unnamed_blocks(
    name: str, shape: tuple[int, ...], scales: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    codes, scale = torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(scales)
    save_file({name: codes, f"{name}_scale": scale}, tmp_path / "model.safetensors")
    settings = {"quant_method": said, "quant_algo": said}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    (weight,) = read_inventory(tmp_path).weights
    if len(scales) > len(shape):
        scale = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0]]
    assert bits(values_of(weight, shape[-1] * 40)) == bits((codes.float() * scale).bfloat16())


def test_groups_that_do_not_divide_the_columns(tmp_path: Path) -> None:
    """96 columns in groups of 64: the last has 32, so groups of 32 hold them."""
    case = "auto-round-4-gptqmodel"

    def shortened(tensors: Tensors, said: Settings) -> None:
        said["group_size"] = 64
        tensors[f"{BASE}.qweight"] = tensors[f"{BASE}.qweight"][:12]
        tensors[f"{BASE}.g_idx"] = torch.arange(96, dtype=torch.int32) // 64
        for suffix in ("scales", "qzeros"):
            tensors[f"{BASE}.{suffix}"] = tensors[f"{BASE}.{suffix}"][:2]

    (weight,) = read_inventory(rewritten(case, tmp_path / "source", shortened)).weights
    assert str(weight.quantization) == "int4/32"
    values = values_of(weight).reshape(32, 96)
    assert bits(values[:, :32]) == bits(expected(case)[:, :32])  # the first group is the same


def test_shapes_of_mlx_that_two_settings_have(tmp_path: Path) -> None:
    parts = mx.quantize(mx.ones((40, 256), mx.bfloat16), group_size=32, bits=4)
    names = (WEIGHT, f"{BASE}.scales", f"{BASE}.biases")
    mx.save_safetensors(str(tmp_path / "m.safetensors"), dict(zip(names, parts, strict=True)))
    with pytest.raises(UnsupportedSourceError, match="2 bits in 64") as caught:
        _ = read_inventory(tmp_path / "m.safetensors").weights
    assert caught.value.tensor == WEIGHT


# Contradictions


def drop(suffix: str) -> Change:
    return lambda tensors, _: tensors.pop(f"{BASE}.{suffix}")


def change(suffix: str, to: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    name = f"{BASE}.{suffix}"
    return lambda tensors, _: tensors.update({name: to(tensors[name]).contiguous()})


def add(suffix: str) -> Change:
    return adding({f"{BASE}.{suffix}": torch.zeros(256)})


def say_of_weights(**settings: Any) -> Change:
    return lambda _, said: said["config_groups"]["group_0"]["weights"].update(settings)


def state(**changes: Any) -> Change:
    """Change what a quant state says; None leaves a key out."""

    def changed(raw: torch.Tensor) -> torch.Tensor:
        said = json.loads(raw.numpy().tobytes()) | changes
        text = json.dumps({key: value for key, value in said.items() if value is not None})
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    return change("weight.quant_state.bitsandbytes__nf4", changed)


def large(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a first number that is almost its dtype's largest."""
    tensor.view(-1)[0] = torch.finfo(tensor.dtype).max
    return tensor


CONTRADICTIONS: dict[str, dict[str, Change]] = {
    "compressed-tensors-int4-g32-zeros": {
        "no scales": drop("weight_scale"),
        "no zero points": drop("weight_zero_point"),
        "zero points that config.json denies": say_of_weights(symmetric=True),
        "groups of 64": say_of_weights(group_size=64),
        "5 bits": say_of_weights(num_bits=5),
        "no bits": say_of_weights(num_bits=None),
        "rows": say_of_weights(strategy="channel", group_size=None),
        "transposed codes": change("weight_packed", lambda codes: codes.T),
        "scales of fewer rows": change("weight_scale", lambda scale: scale[:-1]),
        "scales of integers": change("weight_scale", lambda scale: scale.int()),
        "unpacked zero points of fewer rows": change("weight_zero_point", lambda zero: zero[:-1]),
        "columns in another order": add("weight_g_idx"),
        "scaled inputs": add("pre_quant_scale"),
        "another shape": change("weight_shape", lambda shape: shape + 1),
        "permuted columns": say_of_weights(actorder="group"),
        "rotated weights": say(transform_config={"config_groups": {"a": 1}}),
        "another method": say(quant_method="other"),
    },
    "compressed-tensors-int4-g128": {"two groups": groups("Linear", "Conv1d")},
    "compressed-tensors-int4-g32-permuted": {
        "columns in order, by config.json": say_of_weights(actorder=None),
        "groups of two sizes": change("weight_g_idx", lambda group: group.clamp(min=1)),
        "an unknown order": drop("weight_g_idx"),
    },
    "compressed-tensors-int8-bytes-rows": {
        "no scales": drop("weight_scale"),
        "zero points that are missing": say_of_weights(symmetric=False),
        "groups": say_of_weights(strategy="group", group_size=64),
        "codes beyond 4 bits": say_of_weights(num_bits=4),
        "a scale for all": change("weight_scale", lambda scale: scale[:1]),
        "another method": say(quant_method="other"),
    },
    "compressed-tensors-fp8-blocks": {
        "no scales": drop("weight_scale"),
        "no codes": drop("weight"),
        "blocks of 16x16": say_of_weights(block_structure=[16, 16]),
        "a strategy without a name": say_of_weights(strategy=[], block_structure=[16, 16]),
        "blocks without rows": say_of_weights(block_structure=[0, 64]),
        "a scale for all": change("weight_scale", lambda scale: scale[0, 0]),
        "4 bits": say_of_weights(num_bits=4),
        "integers": say_of_weights(type="int"),
        "transposed scales": change("weight_scale", lambda scale: scale.T),
        "scales of bytes": change("weight_scale", lambda scale: scale.to(torch.uint8)),
        "zero points": add("weight_zero_point"),
        "scaled inputs": add("pre_quant_scale"),
        "scales of fewer rows": change("weight_scale", lambda scale: scale[:-1]),
    },
    "compressed-tensors-mxfp4": {
        "integers of AutoRound": say(quant_method="auto-round", data_type="mx_int", format=None),
        "another format": say(format="mxfp6-pack-quantized", config_groups={}),
        "zero points": add("weight_zero_point"),
        "no codes": drop("weight_packed"),
        "groups of 16": say_of_weights(group_size=16),
        "integers": say_of_weights(type="int"),
    },
    "compressed-tensors-mxfp8": {
        "groups of 64": say_of_weights(group_size=64),
        "exponents as a weight": change("weight", lambda codes: codes.view(torch.float8_e8m0fnu)),
    },
    "gptq-4-g64-permuted": {
        "an unknown order": drop("g_idx"),
        "an order in long integers": change("g_idx", lambda group: group.long()),
    },
    "auto-round-4-gptqmodel": {
        "rotated weights": say(spinquant_config={"r1": True}),
        "AWQ's layout": say(packing_format="auto_round:auto_awq"),
        "5 bits": say(bits=5),
        "no packing": lambda _, said: said.update(backend=said.pop("packing_format")),
        "16 bits": say(extra_config={BASE: {"bits": 16}}),
        "no settings": say(extra_config={BASE: 4}),
    },
    "gptq-4-g128": {
        "no codes": drop("qweight"),
        "groups of none": say(group_size=0),
        "an unknown layout": say(quant_method="auto-round", packing_format="auto_round:other"),
        "no scales": drop("scales"),
        "no zero points": drop("qzeros"),
        "groups of 64": say(group_size=64),
        "8 bits": say(bits=8),
        "5 bits": say(bits=5),
        "no bits": say(bits=None),
        "a layout with planes": say(checkpoint_format="gptq_p"),
        "AWQ's layout": say(quant_method="awq"),
        "transposed codes": change("qweight", lambda codes: codes.T),
        "scales of fewer outputs": change("scales", lambda scale: scale[:, :-1]),
        "packed zero points of fewer outputs": change("qzeros", lambda zero: zero[:, :-1]),
        "permuted columns": change("g_idx", lambda group: group.flip(0)),
        "groups beyond the last": change("g_idx", lambda group: group + 1),
        "another method": say(quant_method="other"),
    },
    "awq-g128-zeros": {
        "no scales": drop("scales"),
        "no zero points": drop("qzeros"),
        "groups of 64": say(group_size=64),
        "3 bits": say(bits=3),
        "no groups": say(group_size=None),
        "no codes": drop("qweight"),
        "a bias beyond F16": change("scales", large),
        "GEMV's layout": say(version="gemv"),
        "GPTQ's layout": say(quant_method="gptq"),
        "transposed codes": change("qweight", lambda codes: codes.T),
        "scales of fewer outputs": change("scales", lambda scale: scale[:, :-1]),
        "zero points of fewer outputs": change("qzeros", lambda zero: zero[:, :-1]),
    },
    "bitsandbytes-nf4-nested": {
        "no scales": drop("weight.absmax"),
        "no codes": drop("weight"),
        "no map": drop("weight.quant_map"),
        "no quant state": drop("weight.quant_state.bitsandbytes__nf4"),
        "no outer scales": drop("weight.nested_absmax"),
        "no outer map": drop("weight.nested_quant_map"),
        "another map": change("weight.quant_map", lambda table: table.flip(0)),
        "FP4": state(quant_type="fp4"),
        "another type": state(quant_type="af4"),
        "larger blocks": state(blocksize=64),
        "blocks of an odd size": state(blocksize=33),
        "larger outer blocks": state(nested_blocksize=512),
        "outer scales of another dtype": state(nested_dtype="float16"),
        "no offset": state(nested_offset=None),
        "no shape": state(shape=None),
        "another shape": state(shape=[40, 255]),
        "a shape that is not a matrix": state(shape=[40 * 256]),
        "a dtype that is not ours": state(dtype="float64"),
        "an unknown key": state(rotation="hadamard"),
        "a state that is too long": state(rotation="h" * 4096),
        "a state not in JSON": change("weight.quant_state.bitsandbytes__nf4", lambda raw: raw[:-1]),
        "scales that are not nested": change("weight.absmax", lambda scale: scale.float()),
        "scales of fewer blocks": change("weight.absmax", lambda scale: scale[:-1]),
        "transposed codes": change("weight", lambda codes: codes.T),
        "fewer codes": change("weight", lambda codes: codes[:-1]),
        "LLM.int8": say(load_in_8bit=True),
        "another method": say(quant_method="other"),
    },
    "bitsandbytes-int8": {
        "no scales": drop("SCB"),
        "scales of fewer rows": change("SCB", lambda scale: scale[:-1]),
        "scales of a column": change("SCB", lambda scale: scale[:, None]),
        "scales of another dtype": change("SCB", lambda scale: scale.half()),
        "a layout of tiles": change("weight_format", lambda number: number + 1),
        "several layouts": change("weight_format", lambda number: number.repeat(2)),
        "no codes": drop("weight"),
        "codes of floats": change("weight", lambda codes: codes.half()),
        "rows that are not there": change("weight", lambda codes: codes[:-1]),
        "a stack": change("weight", lambda codes: codes[..., None]),
        "4 bits": say(load_in_4bit=True),
        "another method": say(quant_method="other"),
    },
}


@pytest.mark.parametrize(
    ("case", "what"), [(case, what) for case, rows in CONTRADICTIONS.items() for what in rows]
)
def test_a_contradiction_is_refused(case: str, what: str, tmp_path: Path, store: Store) -> None:
    folder = rewritten(case, tmp_path / "source", CONTRADICTIONS[case][what])
    with pytest.raises(UnsupportedSourceError, match=re.escape(BASE)) as caught:
        import_model(folder, "m", store=store)
    assert caught.value.tensor is not None
    assert caught.value.tensor.startswith(BASE)
    assert what != "an unknown order" or "g_idx is missing" in caught.value.message
    assert not store.manifests.names()
