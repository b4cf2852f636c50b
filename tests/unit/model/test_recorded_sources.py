"""The table says that Ollama's runner reads the recorded sources, as it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.ollama_sources import write_source

from blobstore.importer.run import plan_import
from blobstore.model.facts import Runs, Verdict

SPACES = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}}]}
SOURCES = {
    "h_gemma4_moe8": "Gemma4ForConditionalGeneration",
    "h_nemotron_h": "NemotronHForCausalLM",
    "h_qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}


def _ollama(folder: Path, **options: Any) -> Verdict:
    """Return Ollama's verdict on a source, but for its tokenizer, which has no Split."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_bytes())
    path.write_text(json.dumps(tokenizer | {"decoder": SPACES}))
    ours, theirs = plan_import(folder, **options).runs_in
    assert (ours.runtime, theirs.runtime) == ("mlx-lm", "Ollama")
    return theirs


@pytest.mark.parametrize("source", SOURCES)
def test_in_ollamas_profile_all_run(tmp_path: Path, source: str) -> None:
    folder = write_source(tmp_path, source)
    verdict = _ollama(folder, profile="ollama")
    assert (verdict.runs, verdict.reason.split(",")[0]) == (Runs.YES, SOURCES[source])
