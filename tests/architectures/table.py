"""The table as Markdown, from the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from architectures.compare import TYPES, Verdict

Row = dict[str, Any]
_GOOD = {Verdict.RIGHT, Verdict.REFUSED}
_PACKAGES = ("mlx-lm", "mlx", "transformers")


def good(row: Row) -> bool:
    """Return whether a row is right or refused at plan time as every type; where mlx-lm has no model, that none crashes."""
    found = {outcome["verdict"] for outcome in row["types"].values()}
    return found <= _GOOD if counted(row) else Verdict.CRASHED not in found


def counted(row: Row) -> bool:
    """Return whether mlx-lm itself loads and runs the checkpoint."""
    return bool(row["mlx_lm"] == "loads")


def table(rows: Sequence[Row], command: str, date: str) -> str:
    """Return the page of docs: the totals, the table, and a list of reasons that are too long for it."""
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    heads = ["architecture", "made by", *(str(quant or "none") for quant in TYPES)]
    inside = [row for row in rows if counted(row)]
    outside = [row for row in rows if not counted(row)]
    return "\n".join(
        [
            "# Architectures",
            "",
            *_introduction(versions, command, date),
            "",
            *_totals(inside),
            "",
            "| " + " | ".join(heads) + " |",
            "|" + "---|" * len(heads),
            *(_line(row) for row in inside),
            "",
            *_reasons(inside),
            *_outside(outside),
            "",
        ]
    )


def _introduction(versions: str, command: str, date: str) -> list[str]:
    return [
        f"Made by `{command}` on {date} with {versions}; do not edit.",
        "",
        "Each row is a checkpoint of a few layers with random weights, in the layout in which checkpoints of the",
        "architecture are published. It is imported as each type, loaded, and exported for mlx-lm. ✓ means: the loaded",
        "network gives the logits of the exported folder in mlx-lm (bit for bit, but for heads that mlx-lm normalises",
        "again), and each of its weights has a cosine of at least 0.99 (4 bits) or 0.999 (8 bits) with the one that",
        "mlx-lm has of the checkpoint itself; what is not quantized is equal. The number is the percentage of parameters",
        "that mlx-lm holds quantized, `+ n` that of those which are stored quantized and become values when the model is",
        "loaded, because mlx-lm computes with them or moves them within a group. *Refused* means: `plan` and `import` say",
        "why, and nothing is written.",
    ]


def _totals(rows: Sequence[Row]) -> list[str]:
    counts = Counter(outcome["verdict"] for row in rows for outcome in row["types"].values())
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    whole = sum(good(row) for row in rows)
    return [f"**{len(rows)} architectures, {whole} of them right or refused as every type**; of all imports {said}."]


def _line(row: Row) -> str:
    cells = [_cell(outcome) for outcome in row["types"].values()]
    return "| " + " | ".join([row["architecture"], row["maker"], *cells]) + " |"


def _cell(outcome: dict[str, Any]) -> str:
    if outcome["verdict"] == Verdict.RIGHT:
        shares = [round(100 * outcome[key]) for key in ("quantized", "dequantized")]
        return " ".join(["✓", *([str(shares[0])] if any(shares) else []), *([f"+ {shares[1]}"] if shares[1] else [])])
    return str(outcome["verdict"]) if outcome["verdict"] == Verdict.REFUSED else f"**{str(outcome['verdict']).upper()}**"


def _reasons(rows: Sequence[Row]) -> list[str]:
    lines = [f"- {row['architecture']}, {reason}" for row in rows for reason in _reasons_of(row)]
    return ["## Why not", "", *lines, ""] if lines else []


def _reasons_of(row: Row) -> list[str]:
    types: dict[tuple[str, str], list[str]] = {}
    for quant, outcome in row["types"].items():
        if outcome["reason"]:
            types.setdefault((outcome["verdict"], outcome["reason"]), []).append(quant.lower())
    return [f"{', '.join(names)}: {what}, {why}" for (what, why), names in types.items()]


def _outside(rows: Sequence[Row]) -> list[str]:
    lines = [
        f"- {row['architecture']} (made by {row['maker']}): {row['mlx_lm']} Here: {'; '.join(_reasons_of(row))}"
        for row in rows
    ]
    return ["## Not counted: what mlx-lm itself can't run here", "", *lines] if lines else []
