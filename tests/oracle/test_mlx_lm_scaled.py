"""Double-scaled nvfp4 in mlx-lm: logits close to a float32 model of the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx import core as mx
from mlx_lm import utils
from support import PYCODE, PYCODE_MOE

import blobstore
from blobstore.store.local.store import Store

TOKENS = mx.array(np.load(PYCODE / "heldout_ids.npy")[:6].astype(np.int32)[None])


def logits(model: Any) -> np.ndarray[Any, Any]:
    return np.array(model(TOKENS).astype(mx.float32))


def with_dequantized_weights(source: Path, store: Store) -> Any:
    """Return mlx-lm's own model of the source in float32 with the stored model's values."""
    network, _ = utils.load_model(source, lazy=True)
    network.set_dtype(mx.float32)
    values: dict[str, Any] = {}
    with blobstore.open_model("m", store=store) as model:
        for name, tensor in model.items():
            values[name] = mx.array(tensor.dequantize())
    stacks = {name for name in values if ".experts." in name}
    for stack in {f"{name.split('.experts.')[0]}.{name.split('.')[-2]}.weight" for name in stacks}:
        group, projection, _ = stack.rsplit(".", 2)
        whole = values.get(f"{group}.experts.{projection}.weight")
        numbered = [f"{group}.experts.{number}.{projection}.weight" for number in range(8)]
        stacked = whole if whole is not None else mx.stack([values[name] for name in numbered])
        values[f"{group}.switch_mlp.{projection}.weight"] = stacked
    values = {name: value for name, value in values.items() if name not in stacks}
    network.load_weights(list(values.items()), strict=True)
    return network


@pytest.mark.parametrize(
    ("source", "experts"),
    [(PYCODE, "packed"), (PYCODE_MOE, "packed"), (PYCODE_MOE, "stacked")],
    ids=["dense", "packed", "stacked"],
)
def test_logits_are_those_of_the_dequantized_weights(
    source: Path, experts: str, store: Store
) -> None:
    blobstore.import_model(
        source, "m", store=store, quant="nvfp4", global_scale=True, experts=experts
    )
    model = blobstore.mlx_lm.load("m", store=store)[0]
    scaled = [module for _, module in model.named_modules() if "global_scale" in module]
    assert len(scaled) > 10
    assert all(type(module).__name__.startswith("Scaled") for module in scaled)
    assert any(float(mx.min(module.global_scale)) < 1 for module in scaled)
    # The stored model computes in bfloat16 between its layers.
    ours, wanted = logits(model), logits(with_dequantized_weights(source, store))
    assert np.linalg.norm(ours - wanted) < 0.02 * np.linalg.norm(wanted)


def test_a_float32_model_computes_the_same_up_to_rounding(store: Store) -> None:
    blobstore.import_model(
        PYCODE_MOE, "m", store=store, quant="nvfp4", global_scale=True, dtype="float32"
    )
    ours = logits(blobstore.mlx_lm.load("m", store=store)[0])
    wanted = logits(with_dequantized_weights(PYCODE_MOE, store))
    np.testing.assert_allclose(ours, wanted, atol=2e-3 * np.abs(wanted).max())
