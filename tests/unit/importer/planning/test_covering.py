"""Coverage: every tensor is stored, derived or left out with a reason, and counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import LLAMA_CONFIG, normal, small_tensors, write_checkpoint
from support.exports import mixture_tensors
from support.prequantized_sources import fp8_model

import blobstore
from blobstore.formats.provenance import DRAFT_MODEL, MTP_HEADS, Coverage, Tally

STACKED = "experts that were stacked"
APPLIED = "scales and biases that were applied to their weights"
COPIED = small_tensors()


def coverage(
    folder: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None, **options: Any
) -> Coverage:
    source = write_checkpoint(folder, tensors, {**LLAMA_CONFIG, **(config or {})})
    found = blobstore.plan_import(source, **options).coverage
    left_out = sum(one.count for one in found.tensors.left_out)
    assert found.tensors.source == found.tensors.covered + left_out
    return found


def test_floats_are_stored_and_stacked_experts_derived(tmp_path: Path) -> None:
    tensors = mixture_tensors()
    count, experts = len(tensors), sum(".experts." in name for name in tensors)
    assert coverage(tmp_path, tensors, quant="int4").tensors == Tally(count, count)
    stacked = coverage(tmp_path, tensors, experts="stacked").tensors
    assert stacked == Tally(count, count - experts, {STACKED: experts})


def test_block_scales_are_applied_and_those_of_activations_left_out(tmp_path: Path) -> None:
    tensors = fp8_model({f"model.{name}.weight": normal(name, 128, 128) for name in "ab"})
    scales = {f"model.{name}.input_scale": np.ones((), np.float32) for name in "ab"}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    found = coverage(tmp_path, {**tensors, **scales}, config).tensors
    assert (found.source, found.stored, dict(found.derived)) == (6, 2, {APPLIED: 2})
    assert [(one.name, one.count) for one in found.left_out] == [("*.input_scale", 2)]


@pytest.mark.parametrize(
    ("names", "config", "count"),
    [
        (["mtp.fc", "mtp.layers.0.x", "model.mtp.x", "nomtp.x"], {}, 3),
        (["layers.1.x", "layers.2.eh_proj", "layers.10.x"], {"num_hidden_layers": 2}, 2),
        (["model.language_model.layers.2.x"], {"text_config": {"num_hidden_layers": 2}}, 1),
        (["model.visual.layers.2.x"], {"num_hidden_layers": 2}, 0),
    ],
)
def test_heads_for_more_tokens_are_counted(
    tmp_path: Path, names: list[str], config: dict[str, Any], count: int
) -> None:
    tensors = {f"{name}.weight": normal(name, 4, 64) for name in names}
    assert coverage(tmp_path, tensors, config).heads == ({MTP_HEADS: count} if count else {})


def test_a_draft_models_tensors_are_counted(tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path / "draft", {"fc.weight": normal("d", 64, 64)})
    found = coverage(tmp_path / "m", COPIED, draft=draft)
    assert found.heads == {DRAFT_MODEL: 1}
    assert found.tensors == Tally(len(COPIED) + 1, len(COPIED) + 1)
    assert found.files == Tally(4, 4)
