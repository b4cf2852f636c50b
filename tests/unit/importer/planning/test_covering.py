"""Coverage: every tensor is stored, derived or left out with a reason, and counted once."""

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import LLAMA_CONFIG, normal, write_checkpoint
from support.exports import mixture_tensors

import blobstore
from blobstore.formats.documents import MTP_HEADS, Coverage, Tally

STACKED = "experts that were stacked"


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


@pytest.mark.parametrize(
    ("names", "config", "count"),
    [
        (["mtp.fc", "mtp.layers.0.x", "model.mtp.x", "nomtp.x"], {}, 3),
        (["layers.1.x", "layers.2.eh_proj", "layers.10.x"], {"num_hidden_layers": 2}, 2),
        (["model.language_model.layers.2.x"], {"text_config": {"num_hidden_layers": 2}}, 1),
        (["model.visual.layers.2.x"], {"num_hidden_layers": 2}, 0),
    ],
)
def test_more_heads(tmp_path: Path, names: list[str], config: dict[str, Any], count: int) -> None:
    tensors = {f"{name}.weight": normal(name, 4, 64) for name in names}
    assert coverage(tmp_path, tensors, config).heads == ({MTP_HEADS: count} if count else {})
