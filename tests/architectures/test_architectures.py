"""A few telling architectures, each as one type; all are in docs/reference/architectures.md."""

from pathlib import Path

import pytest
from support import ROOT

from architectures.compare import Verdict, compare, source_network
from architectures.converted import ROWS as CONVERTED_ROWS, compare_conversion
from architectures.rows import architectures

ROWS = architectures()
TELLING = {
    "baichuan_m1": "int8",  # a head that is normalised
    "dbrx": "int4",  # experts joined along rows, one of three transposed
    "longcat_flash": "mxfp8",  # latent attention
    "qwen3_vl_moe": "int4",  # fused experts, transposed
}
IN_THE_LABORATORY = {  # MLX compiles their kernels with a C++ compiler, for seconds
    "gpt2": "mxfp8",  # Conv1D
    "gpt_oss, mxfp4": None,  # as OpenAI publishes it
    "recurrent_gemma": "int8",  # a sanitize that changes the network
}


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        *TELLING.items(),
        *(pytest.param(*row, marks=pytest.mark.lab) for row in IN_THE_LABORATORY.items()),
    ],
)
def test_what_is_stored_runs(name: str, quant: str | None, tmp_path: Path) -> None:
    source = tmp_path / "source"
    ROWS[name].make(source)
    outcome = compare(source, quant, source_network(source))
    assert (outcome.verdict, outcome.reason) == (Verdict.RIGHT, "")


def test_what_mlx_lm_converted_is_as_it_is_there(tmp_path: Path) -> None:
    ROWS["baichuan_m1"].make(tmp_path / "source")
    outcome = compare_conversion(tmp_path / "source", "int4")
    assert (outcome.verdict, outcome.reason) == (Verdict.RIGHT, "")


def test_a_wrong_network_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ROWS["minicpm"].make(source)
    network = source_network(source)
    layer = network.model.layers[1].mlp.up_proj
    layer.weight = layer.weight[::-1]
    outcome = compare(source, "int4", network)
    assert outcome.verdict == Verdict.WRONG
    assert "layers.1.mlp.up_proj.weight" in outcome.reason


def test_the_pages_have_every_row() -> None:
    page, converted = (
        (ROOT / "docs" / "reference" / f"{name}.md").read_text()
        for name in ("architectures", "architectures-converted")
    )
    assert [name for name in ROWS if f"| {name} |" not in page and f"- {name} (" not in page] == []
    assert [name for name in CONVERTED_ROWS if f"| {name} |" not in converted] == []
