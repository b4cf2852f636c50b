"""A few telling architectures, each as one or two types.

All of them, as all types, are the table: docs/reference/architectures.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ROOT

from architectures.compare import Verdict, compare, source_network
from architectures.converted import ROWS as CONVERTED_ROWS, compare_conversion
from architectures.rows import architectures

ROWS = architectures()
TELLING: dict[str, list[str | None]] = {
    "afm7": ["int4"],  # modules that take no modes
    "baichuan_m1": ["int8"],  # a head that is normalised
    "bailing_moe, norm_head": ["nvfp4"],
    "dbrx": ["int4"],  # experts joined along rows, one of three transposed
    "falcon_h1, multipliers": ["int8"],  # weights that are multiplied
    "gpt2": ["int4", "mxfp8"],  # Conv1D
    "kimi_k25": ["nvfp4"],  # latent attention, towers
    "kimi_linear": ["int4", "mxfp8"],  # latent attention, convolutions, experts called w1 to w3
    "mamba2, Infinity": [None, "int4"],
    "minimax": ["int8"],
    "nemotron_h, dense": ["mxfp8"],
    "qwen3_5_moe": ["int4", "nvfp4"],  # fused experts, norms from zero
    "qwen3_next, tied": [None, "int4"],  # a sanitize that returns early
    "qwen3_vl_moe": ["int4"],  # fused experts, transposed
    "recurrent_gemma": ["int8"],  # a sanitize that changes the network
    "step3p5": ["int4"],  # experts of three axes
}


@pytest.mark.parametrize("name", TELLING)
def test_what_is_stored_runs(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    ROWS[name].make(source)
    network = source_network(source)
    outcomes = {quant: compare(source, quant, network) for quant in TELLING[name]}
    assert {
        quant: (outcome.verdict, outcome.reason) for quant, outcome in outcomes.items()
    } == dict.fromkeys(TELLING[name], (Verdict.RIGHT, ""))


# Conversions of mlx-lm: how they say the types of modules, and heads that are normalised before
# they are quantized.
CONVERTED = [("baichuan_m1", "int4"), ("kimi_k25", "mxfp4"), ("rwkv7", "int4")]


@pytest.mark.parametrize(("name", "conversion"), CONVERTED)
def test_what_mlx_lm_converted_is_as_it_is_there(
    name: str, conversion: str, tmp_path: Path
) -> None:
    ROWS[name].make(tmp_path / "source")
    outcome = compare_conversion(tmp_path / "source", conversion)
    assert (outcome.verdict, outcome.reason) == (Verdict.RIGHT, "")


def test_a_wrong_network_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ROWS["minicpm"].make(source)
    network = source_network(source)
    layer = network.model.layers[1].mlp.up_proj
    layer.weight = layer.weight[::-1]
    outcome = compare(source, "int4", network)
    assert outcome.verdict == Verdict.WRONG
    assert "layers.1.mlp.up_proj.weight" in outcome.reason


def test_the_same_recipe_gives_the_same_checkpoint(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        ROWS["mimo"].make(tmp_path / folder)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_the_pages_have_every_row() -> None:
    page, converted = (
        (ROOT / "docs" / "reference" / f"{name}.md").read_text()
        for name in ("architectures", "architectures-converted")
    )
    assert [name for name in ROWS if f"| {name} |" not in page and f"- {name} (" not in page] == []
    assert [name for name in CONVERTED_ROWS if f"| {name} |" not in converted] == []
