"""Checkpoints that mlx-lm has converted: blobstore's import compared with mlx-lm's own network."""

import contextlib
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from architectures.compare import Outcome, Verdict, compare, said, source_network

CONVERSIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "int4": {"bits": 4},
    "int4/32": {"bits": 4, "group_size": 32},
    "int8": {"bits": 8},
    "mxfp4": {"mode": "mxfp4"},
    "mxfp8": {"mode": "mxfp8"},
    "nvfp4": {"mode": "nvfp4"},
    "nvfp4, global scales": {"mode": "nvfp4", "global_scale": True},
    "3 bits": {"bits": 3},
    "6 bits": {"bits": 6},
    "mixed_3_6": {"recipe": "mixed_3_6"},
    "mixed_4_6": {"recipe": "mixed_4_6"},
}
"""What ``mlx_lm.convert`` is asked for, by name.

Its groups are of 64 unless it is told otherwise, or by its mode.
"""

ROWS = (
    *("afmoe", "baichuan_m1", "deepseek_v3", "falcon_h1", "gemma3", "gemma3n", "glm4_moe"),
    *("gpt_oss, mxfp4", "kimi_linear", "lfm2_moe", "llama", "llama, tied", "llama4", "mamba2"),
    *("minimax", "mixtral", "phi3", "qwen3", "qwen3_moe", "qwen3_next", "rwkv7", "step3p5"),
)
"""The architectures of the page: those that many convert, and those whose conversions are odd."""


def convert(source: Path, folder: Path, conversion: str) -> None:
    """Write what mlx-lm's ``convert`` writes for a checkpoint, but for its tokenizer and README."""
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    options: dict[str, Any] = {"group_size": None, "bits": None, **CONVERSIONS[conversion]}
    network, config = load_model(source, lazy=True)
    if recipe := options.pop("recipe", None):  # as the command does
        options["quant_predicate"] = mixed_quant_predicate_builder(recipe, network, None)
    if CONVERSIONS[conversion]:
        with contextlib.redirect_stdout(io.StringIO()):
            network, config = quantize_model(network, config, **options)
    save_model(folder, network, donate_model=True)
    has_tower = "vision_tower" in getattr(network, "model", {})
    save_config(config, folder / "config.json", keep_vision_config=has_tower)


def compare_conversion(source: Path, conversion: str) -> Outcome:
    """Return the outcome of importing the checkpoint in ``source``, converted by mlx-lm."""
    with tempfile.TemporaryDirectory(prefix="blobstore-architectures-") as scratch:
        folder = Path(scratch, "converted")
        try:
            convert(source, folder, conversion)
        except Exception as error:  # noqa: BLE001  # mlx-lm raises what it likes
            return Outcome(verdict=Verdict.NOT_COMPARED, reason=f"mlx-lm: {said(error)}")
        outcome = compare(folder, None, source_network(folder))
    if outcome.verdict == Verdict.RIGHT and outcome.error:
        return Outcome(verdict=Verdict.WRONG, reason="logits differ from the converted folder's")
    return outcome
