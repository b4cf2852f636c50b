"""Plans of networks: which codes move where, what gets values, and what is refused."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support import PYCODE, PYCODE_MOE

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.dtypes import Quantization, QuantType
from blobstore.formats.safetensors.header import header_of
from blobstore.io.ranges import FileReader
from blobstore.model.facts import TensorFacts
from blobstore.model.network import check_counts, plan_network
from blobstore.model.on_mlx_lm import mlx_lm_errors

INT4 = Quantization(QuantType.INT4, 32)
EXPERTS = "model.layers.0.mlp.experts"


def tensors_of(folder: Any, quantization: Quantization | None = None) -> Iterator[TensorFacts]:
    """The tensors of a fixture; its projections as if they were quantized."""
    with FileReader(folder / "model.safetensors") as reader:
        header = header_of(reader)
    for name, entry in header.tensors.items():
        yield TensorFacts(name, entry.dtype, entry.shape, quantization if "_proj" in name else None)


def config_of(folder: Any) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def test_experts_of_different_types_get_values() -> None:
    tensors = [
        one._replace(quantization=Quantization(QuantType.INT8, 64))
        if one.name == f"{EXPERTS}.1.up_proj.weight"
        else one
        for one in tensors_of(PYCODE_MOE, INT4)
    ]
    plan = plan_network(config_of(PYCODE_MOE), tensors, "m")
    found = {one.name: one.quantization for one in plan.parameters}
    assert found["model.layers.0.mlp.switch_mlp.up_proj.weight"] is None
    assert found["model.layers.0.mlp.switch_mlp.down_proj.weight"] == INT4
    assert plan.dequantized[0] == f"{EXPERTS}.0.up_proj.weight"


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


def test_no_error_of_mlx_lm_leaves_raw() -> None:
    changes: dict[str, Any] = {"model_type": "nope", "hidden_size": None}
    changes["num_hidden_layers"] = 10**9
    for key, value in changes.items():
        with pytest.raises(UnsupportedSourceError, match=r"model m: "):
            plan_network(config_of(PYCODE) | {key: value}, tensors_of(PYCODE), "m")
    with (
        pytest.raises(UnsupportedSourceError, match="mlx-lm can't build model m: SystemExit: 1"),
        mlx_lm_errors("build", "m"),
    ):
        raise SystemExit(1)


def test_more_modules_than_tensors_can_be_are_refused() -> None:
    """mlx-lm would make an object for each."""
    shapes = [(4096, 256)] * 30
    configs: list[dict[str, Any]] = [
        {"num_hidden_layers": 10**9},
        {"n_layer": 1001},
        {"altup_num_inputs": 10**30},
        {"text_config": {"ffn_config": {"moe_num_experts": 4097}}},
    ]
    for config in configs:
        with pytest.raises(UnsupportedSourceError, match="too many for 30 tensors"):
            check_counts(config, shapes)
    check_counts({"num_hidden_layers": 1000, "num_layers": 1e9, "num_experts": [8]}, shapes)
    check_counts({"max_position_embeddings": 10**7, "n_routed_experts": None}, shapes)


def test_a_hostile_model_type_is_named_in_one_short_line() -> None:
    for model_type in ("x\n\x1b[31m", "x" * 10**6, "..", "os", "base"):
        with pytest.raises(UnsupportedSourceError, match="mlx-lm can't build model m: ") as caught:
            plan_network({"model_type": model_type}, [], "m")
        assert caught.value.message.isprintable()
        assert len(caught.value.message) < 400
