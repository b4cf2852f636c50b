"""The short form of producers.py and gguf_variants.py: some variants of each producer."""

from pathlib import Path

import pytest
from producer_values import meaning
from producer_variants import SEEDS, recorded
from producers import compare, run
from safetensors.torch import load_file
from support import FIXTURES

CASES = [path.name for path in sorted((FIXTURES / "producers").iterdir()) if path.is_dir()]


@pytest.mark.parametrize("producer", SEEDS)
def test_the_invariant_holds_for_variants(producer: str, tmp_path: Path) -> None:
    *_, (_, report) = run(producer, range(20), tmp_path)
    assert report.broken == {}
    assert report.counts.keys() == {"equal", "refused"}


def test_the_invariant_holds_for_gguf_files(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    *_, (_, report) = run("GGUF", range(45), tmp_path)
    assert report.broken == {}
    assert report.counts.keys() == {"equal", "refused"}


def test_what_variants_are_compared_with_agrees_with_the_libraries() -> None:
    for case in CASES:
        (one,) = recorded(case + "/")
        values = load_file(FIXTURES / "producers" / case / "dequantized.safetensors")
        for name, wanted in meaning(one.tensors, one.config).items():
            compare(name, values[name].double().numpy(), wanted)
