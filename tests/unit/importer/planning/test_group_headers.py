"""Headers of groups of experts; groups that can't be read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import normal, write_checkpoint

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.dtypes import DType
from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import ImportPlan, PlannedBlob
from blobstore.importer.plan import check_readable, make_plan
from blobstore.importer.run import plan_import

CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 2}


def mixture(folder: Path, **more: np.ndarray) -> Path:
    """Write a mixture of eleven layers of two experts: names of groups differ in length."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
        for layer in range(11)
        for expert in range(2)
        for projection in ("up", "gate", "down")
    ]
    tensors = {name: normal(name, 64, 64) for name in names}
    tensors["model.layers.0.self_attn.q_proj.weight"] = normal("q", 64, 64)
    return write_checkpoint(folder, tensors | more, config=CONFIG)


def planned(source: Path, **words: object) -> ImportPlan:
    return plan_import(source, experts="packed", **words)  # type: ignore[arg-type]


def test_one_group_that_would_be_read_as_others_is_refused(tmp_path: Path) -> None:
    good, group, *_ = (blob for blob in planned(mixture(tmp_path)).blobs if blob.tensors[1:])
    codes = replace(group.tensors[0], name=f"{group.name}.0.codes", dtype=DType.U32, shape=(8, 8))
    scale = replace(codes, name=f"{codes.name}.scale", dtype=DType.F16, shape=(8, 1))
    odd = PlannedBlob.of(group.name, (codes, scale), group.options)
    with pytest.raises(UnsupportedSourceError, match="read back"):
        check_readable([good, odd])


def test_the_weights_of_a_checkpoint_are_assembled_once_for_all_its_plans(tmp_path: Path) -> None:
    plan = planned(mixture(tmp_path), quant="int4")
    again = make_plan(plan.inventory, ImportOptions.parse(quant="int8"))
    assert again.inventory is plan.inventory
