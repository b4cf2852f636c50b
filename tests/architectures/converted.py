"""Checkpoints that mlx-lm has converted: blobstore's import compared with mlx-lm.

A model is right when each parameter of the network that is loaded from the store, and of the
exported folder, has the bytes that it has in mlx-lm's own network of the converted folder. Asked
for int4, codes are refused and floats quantized.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from architectures.compare import (
    Ended,
    Outcome,
    Verdict,
    compare,
    load_folder,
    logits_of,
    said,
    step,
)

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
    "afmoe",
    "baichuan_m1",
    "deepseek_v3",
    "falcon_h1",
    "gemma3",
    "gemma3n",
    "glm4_moe",
    "gpt_oss, mxfp4",
    "kimi_linear",
    "lfm2_moe",
    "llama",
    "llama, tied",
    "llama4",
    "mamba2",
    "minimax",
    "mixtral",
    "phi3",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "rwkv7",
    "step3p5",
)
"""The architectures of the page: those that many convert, and those whose conversions are odd."""


def convert(source: Path, folder: Path, conversion: str) -> None:
    """Write what mlx-lm's ``convert`` writes for a checkpoint, but for its tokenizer and README."""
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    options = dict(CONVERSIONS[conversion])
    network, config = load_model(source, lazy=True)
    if recipe := options.pop("recipe", None):
        options["quant_predicate"] = mixed_quant_predicate_builder(
            recipe, network, None
        )  # as the command does
    if CONVERSIONS[conversion]:
        with contextlib.redirect_stdout(io.StringIO()):
            network, config = quantize_model(
                network,
                config,
                options.pop("group_size", None),
                options.pop("bits", None),
                **options,
            )
    save_model(folder, network, donate_model=True)
    save_config(
        config,
        folder / "config.json",
        keep_vision_config="vision_tower" in getattr(network, "model", {}),
    )


def compare_conversion(source: Path, conversion: str) -> Outcome:
    """Return the outcome of importing the checkpoint in ``source``, converted by mlx-lm."""
    with tempfile.TemporaryDirectory(prefix="blobstore-architectures-") as scratch:
        folder = Path(scratch, "converted")
        try:
            convert(source, folder, conversion)
            theirs = load_folder(folder)
        except Exception as error:  # noqa: BLE001  # mlx-lm raises what it likes
            return Outcome(verdict=Verdict.NOT_COMPARED, reason=f"mlx-lm: {said(error)}")
        try:
            return _judged(folder, Path(scratch), theirs)
        except Ended as end:
            return end.outcome


def _judged(folder: Path, scratch: Path, theirs: Any) -> Outcome:
    import blobstore

    store, exported = blobstore.open_store(scratch / "store"), scratch / "exported"
    step("plan", Verdict.REFUSED, lambda: blobstore.plan_import(folder))
    step("import", Verdict.LATE, lambda: blobstore.import_model(folder, "m", store=store))
    loaded = step("load", Verdict.LATE, lambda: blobstore.mlx_lm.load_network("m", store=store))
    step(
        "export",
        Verdict.LATE,
        lambda: blobstore.export_model("m", exported, store=store, format="mlx"),
    )
    again = step("the exported folder", Verdict.CRASHED, lambda: load_folder(exported))
    for what, network in (("loaded", loaded), ("exported", again)):
        if difference := _difference(network, theirs):
            raise Ended(Verdict.WRONG, f"{what}: {difference}")
    _check_logits({"loaded": loaded, "exported": again}, theirs)
    return _quantized_again(folder, theirs)


def _check_logits(networks: Mapping[str, Any], theirs: Any) -> None:
    try:
        meant = logits_of(theirs)
    except Exception as error:  # noqa: BLE001  # mlx-lm raises what it likes
        raise Ended(Verdict.NOT_COMPARED, f"mlx-lm: {said(error)}") from None
    for what, network in networks.items():
        logits = step(f"{what}: logits", Verdict.CRASHED, partial(logits_of, network))
        if not bool((logits == meant).all()):
            raise Ended(Verdict.WRONG, f"{what}: logits differ")


def _quantized_again(folder: Path, theirs: Any) -> Outcome:
    """Return what comes of it as int4, which has to be refused where mlx-lm has quantized it."""
    outcome = compare(folder, "int4", theirs)
    wanted = Verdict.REFUSED if _quantized(theirs) else Verdict.RIGHT
    if outcome.verdict != wanted:
        raise Ended(Verdict.WRONG, f"as int4 {outcome.verdict}, {outcome.reason}")
    return Outcome(verdict=Verdict.RIGHT)


def _difference(network: Any, meant: Any) -> str | None:
    """Return how two networks differ in parameters or module types; None if they are equal."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    ours, theirs = dict(tree_flatten(network.parameters())), dict(tree_flatten(meant.parameters()))
    if odd := sorted(ours.keys() ^ theirs.keys()):
        return f"{odd[0]} is in one of both networks only, and {len(odd) - 1} more"
    for path, array in sorted(ours.items()):
        other = theirs[path]
        if (
            array.shape != other.shape
            or not mx.array_equal(array.astype(other.dtype), other, equal_nan=True).item()
        ):
            return f"{path} differs"
    return None if _quantized(network) == _quantized(meant) else "quantized modules differ"


def _quantized(network: Any) -> dict[str, tuple[Any, ...]]:
    """Return the types of quantized modules by path."""
    return {
        path: (module.bits, module.group_size, module.mode)
        for path, module in network.named_modules()
        if hasattr(module, "bits") and "scales" in module
    }
