"""Plans of networks: which codes move where, what gets values, and what is refused.

No weight is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support import PYCODE, PYCODE_MOE

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization, QuantType
from blobstore.formats.safetensors.header import header_of
from blobstore.io.ranges import FileReader
from blobstore.model.facts import TensorFacts
from blobstore.model.network import NetworkPlan, check_counts, plan_network, planned_arrays
from blobstore.model.on_mlx_lm import mlx_lm_errors
from blobstore.model.sanitize import Computed, Joined, Stored

INT4 = Quantization(QuantType.INT4, 32)
NVFP4 = Quantization(QuantType.NVFP4, 16)
EXPERTS = "model.layers.0.mlp.experts"


def tensors_of(folder: Any, quantization: Quantization | None = None) -> Iterator[TensorFacts]:
    """The tensors of a fixture; its projections as if they were quantized."""
    with FileReader(folder / "model.safetensors") as reader:
        header = header_of(reader)
    for name, entry in header.tensors.items():
        yield TensorFacts(name, entry.dtype, entry.shape, quantization if "_proj" in name else None)


def config_of(folder: Any, **changes: Any) -> dict[str, Any]:
    return {**json.loads((folder / "config.json").read_text()), **changes}


def stacked(tensors: list[TensorFacts]) -> list[TensorFacts]:
    """The same with the experts of each projection as one tensor."""
    made: dict[str, TensorFacts] = {}
    for one in tensors:
        name, number, projection = one.name, "", ""
        if ".experts." in name:
            group, _, rest = name.partition(".experts.")
            number, _, projection = rest.partition(".")
            name = f"{group}.experts.{projection}"
        count = made[name].shape[0] + 1 if number and name in made else 1
        made[name] = one._replace(name=name, shape=(count, *one.shape) if number else one.shape)
    return list(made.values())


def parameter(plan: NetworkPlan, name: str) -> Any:
    return next(one for one in plan.parameters if one.name == name)


@pytest.mark.parametrize("form", ["packed", "stacked, source known", "stacked"])
def test_experts_become_one_parameter_with_their_codes(form: str) -> None:
    tensors = list(tensors_of(PYCODE_MOE, INT4))
    names = None if form == "stacked" else frozenset(one.name for one in tensors)
    given = tensors if form == "packed" else stacked(tensors)
    plan = plan_network(config_of(PYCODE_MOE), given, "m", names)
    up = parameter(plan, "model.layers.0.mlp.switch_mlp.up_proj.weight")
    assert up.quantization == INT4
    assert isinstance(up.expression, Joined if form == "packed" else Stored)
    assert plan.dequantized == []
    arrays = {array.name: array for array in planned_arrays(plan)}
    codes, scales = (
        arrays[f"model.layers.0.mlp.switch_mlp.up_proj.{part}"] for part in ("weight", "scales")
    )
    experts, rows, cols = up.expression.shape
    assert (codes.dtype, codes.shape) == (DType.U32, (experts, rows, cols // 8))
    assert (scales.dtype, scales.shape) == (DType.BF16, (experts, rows, cols // 32))


def test_experts_of_different_types_get_values() -> None:
    tensors = [
        one._replace(quantization=Quantization(QuantType.INT8, 64))
        if one.name == f"{EXPERTS}.1.up_proj.weight"
        else one
        for one in tensors_of(PYCODE_MOE, INT4)
    ]
    plan = plan_network(config_of(PYCODE_MOE), tensors, "m")
    assert parameter(plan, "model.layers.0.mlp.switch_mlp.up_proj.weight").quantization is None
    assert parameter(plan, "model.layers.0.mlp.switch_mlp.down_proj.weight").quantization == INT4
    assert plan.dequantized[0] == f"{EXPERTS}.0.up_proj.weight"


def test_global_scales_are_honoured_where_a_module_can() -> None:
    tensors = [
        one._replace(
            quantization=NVFP4 if "proj" in one.name or "embed" in one.name else None,
            double_scaled="norm" not in one.name,
        )
        for one in tensors_of(PYCODE)
    ]
    plan = plan_network(config_of(PYCODE), tensors, "m")
    assert parameter(plan, "model.layers.0.mlp.up_proj.weight").quantization == NVFP4
    assert parameter(plan, "model.embed_tokens.weight").quantization is None
    assert plan.dequantized == ["model.embed_tokens.weight"]


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    tensors = list(tensors_of(PYCODE))
    norm = next(one for one in tensors if one.name == "model.norm.weight")
    others = [one for one in tensors if one is not norm]
    cases = {
        "needs 'model.norm.weight'": others,
        "has no place for 'stray.weight'": [*tensors, norm._replace(name="stray.weight")],
        r"'model.norm.weight' is \[3\], and mlx-lm's network needs \[256\]": [
            *others,
            norm._replace(shape=(3,)),
        ],
    }
    for says, given in cases.items():
        with pytest.raises(UnsupportedSourceError, match=f"model m: .*{says}") as caught:
            plan_network(config_of(PYCODE), given, "m")
        assert caught.value.model == "m"


@pytest.mark.parametrize(
    "changes", [{"model_type": "nope"}, {"hidden_size": None}, {"num_hidden_layers": "many"}]
)
def test_no_error_of_mlx_lm_leaves_raw(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSourceError, match=r"model m: "):
        plan_network(config_of(PYCODE, **changes), tensors_of(PYCODE), "m")


def test_latent_attention_splits_codes_and_dequantizes_what_it_transposes() -> None:
    """deepseek_v3's ``kv_b_proj``: rows of values keep their groups, keys are transposed."""
    sizes = ("hidden_size", "intermediate_size", "vocab_size", "kv_lora_rank")
    heads = ("qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim", "moe_intermediate_size")
    counts = ("num_hidden_layers", "first_k_dense_replace")
    config: dict[str, Any] = {"model_type": "deepseek_v3", "q_lora_rank": None}
    config |= dict.fromkeys(sizes, 64) | dict.fromkeys(heads, 32) | dict.fromkeys(counts, 1)
    config |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2)
    config["n_routed_experts"] = None
    shapes = {
        "model.embed_tokens.weight": (64, 64),
        "lm_head.weight": (64, 64),
        "model.norm.weight": (64,),
        **{
            f"model.layers.0.{norm}.weight": (64,)
            for norm in ("input_layernorm", "post_attention_layernorm")
        },
        **{f"model.layers.0.mlp.{part}_proj.weight": (64, 64) for part in ("gate", "up", "down")},
        "model.layers.0.self_attn.q_proj.weight": (128, 64),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (96, 64),
        "model.layers.0.self_attn.kv_a_layernorm.weight": (64,),
        "model.layers.0.self_attn.kv_b_proj.weight": (128, 64),
        "model.layers.0.self_attn.o_proj.weight": (64, 64),
    }
    tensors = [
        TensorFacts(name, DType.BF16, shape, INT4 if "_b_" in name else None)
        for name, shape in shapes.items()
    ]
    plan = plan_network(config, tensors, "m")
    assert parameter(plan, "model.layers.0.self_attn.unembed_out.weight").quantization == INT4
    assert parameter(plan, "model.layers.0.self_attn.embed_q.weight").quantization is None
    assert not any(isinstance(one.expression, Computed) for one in plan.parameters)
    assert plan.dequantized == ["model.layers.0.self_attn.kv_b_proj.weight"]


def test_a_model_of_mlx_lm_that_ends_the_process_is_refused() -> None:
    with (
        pytest.raises(UnsupportedSourceError, match="mlx-lm can't build model m: SystemExit: 1"),
        mlx_lm_errors("build", "m"),
    ):
        raise SystemExit(1)


SHAPES = [(4096, 256)] * 30


def test_more_modules_than_tensors_can_be_are_refused() -> None:
    """mlx-lm would make an object for each."""
    configs: list[dict[str, Any]] = [
        {"num_hidden_layers": 10**9},
        {"n_layer": 1001},
        {"altup_num_inputs": 10**30},
        {"text_config": {"ffn_config": {"moe_num_experts": 4097}}},
        {"sliding_window_pattern": 10**9},
    ]
    for config in configs:
        with pytest.raises(UnsupportedSourceError, match="too many for 30 tensors"):
            check_counts(config, SHAPES)


def test_other_numbers_pass() -> None:
    nothing = {"num_hidden_layers": -1, "n_routed_experts": None, "num_layers": 1e9}
    check_counts({"num_hidden_layers": 1000, "vision_config": {"num_hidden_layers": 60}}, SHAPES)
    check_counts({**nothing, "num_experts": [8]}, SHAPES)
    check_counts({"max_position_embeddings": 10**7, "vocab_size": 10**6}, SHAPES)


def test_a_network_of_a_billion_layers_is_never_built() -> None:
    tensor = TensorFacts("model.norm.weight", DType.BF16, (256,))
    with pytest.raises(UnsupportedSourceError, match="'1000000000', too many for 1 tensors"):
        plan_network(config_of(PYCODE, num_hidden_layers=10**9), [tensor], "m")


def test_a_hostile_model_type_is_named_in_one_short_line() -> None:
    for model_type in ("x\n\x1b[31m", "x" * 10**6, "..", "os", "base"):
        with pytest.raises(UnsupportedSourceError, match="mlx-lm can't build model m: ") as caught:
            plan_network({"model_type": model_type}, [], "m")
        assert caught.value.message.isprintable()
        assert len(caught.value.message) < 400
