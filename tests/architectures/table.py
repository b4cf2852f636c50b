"""The table as Markdown, from the rows."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from architectures.compare import TYPES, Verdict
from architectures.converted import CONVERSIONS

Row = dict[str, Any]
_GOOD = {Verdict.RIGHT, Verdict.REFUSED, Verdict.NOT_COMPARED}
_BAD = {Verdict.WRONG, Verdict.CRASHED}
_PACKAGES = ("mlx-lm", "mlx", "transformers")
_NAME = re.compile(r"'[^']+'")
_INTRODUCTION = """\
Each row is a checkpoint of a few layers with random weights, in the layout in which checkpoints of
the architecture are published. It is imported as each type, loaded, and exported for mlx-lm.

- ✓: the loaded network gives the logits of the exported folder in mlx-lm (bit for bit, except for
  heads that mlx-lm normalises again). Each of its weights has a cosine of at least 0.99 (4 bits) or
  0.999 (8 bits) with the weight that mlx-lm loads from the checkpoint itself. Unquantized weights
  are equal.
- The number is the percentage of parameters that mlx-lm holds quantized. `+ n` is the percentage of
  those that are stored quantized and become values when the model is loaded, because mlx-lm
  computes with them or moves them within a group.
- *Refused*: `plan` and `import` say why, and nothing is written.
"""
_CONVERTED = """\
Each row is a checkpoint of [the table of architectures](architectures.md). mlx-lm's own code has
converted it, as `mlx_lm.convert` does, and it is imported as it is.

- ✓: the network loaded from the store, and the folder exported for mlx-lm, have each parameter of
  the converted folder, bit for bit, and give the same logits. `--quant int4` quantizes floats, and
  is refused for codes.
- *Refused*: `plan` and `import` name a tensor and say why.
- *Not compared*: mlx-lm can't convert or load the checkpoint.

Bailing with `norm_head` is not in the table: mlx-lm 0.32.2 quantizes its head, and divides the
codes by norms when it loads them. From a store mlx-lm gets the head's values.
"""


def good(row: Row) -> bool:
    """Return whether a row is right in every type.

    Where mlx-lm runs the model, it has to be right or refused at plan time.
    """
    found = {outcome["verdict"] for outcome in row["types"].values()}
    return found <= _GOOD if counted(row) else not found & _BAD


def counted(row: Row) -> bool:
    """Return whether mlx-lm itself loads and runs the checkpoint."""
    return bool(row["mlx_lm"] == "loads")


def table(rows: Sequence[Row], date: str) -> str:
    """Return the page: the totals, the table, and the reasons that are too long for the table."""
    inside = [row for row in rows if counted(row)]
    outside = [row for row in rows if not counted(row)]
    head = [
        "# Architectures",
        "",
        _made_by("python tests/architectures", date),
        "",
        *_INTRODUCTION.split("\n"),
        *_totals(inside),
        "",
    ]
    heads = [str(quant or "none") for quant in TYPES]
    return _page([*head, *_lines(inside, heads), "", *_reasons(inside), *_outside(outside), ""])


def converted_table(rows: Sequence[Row], date: str) -> str:
    """Return the page of docs on what mlx-lm has converted."""
    head = [
        "# Converted by mlx-lm",
        "",
        _made_by("python tests/architectures --converted", date),
        "",
        *_CONVERTED.split("\n"),
    ]
    return _page(
        [*head, *_lines(rows, list(CONVERSIONS)), "", "## Why not", "", *_common_reasons(rows), ""]
    )


def _page(lines: Sequence[str]) -> str:
    return "\n".join(part for line in lines for part in _wrapped(line))


def _wrapped(line: str) -> list[str]:
    if not line or line.startswith(("|", "#")):
        return [line]
    indent = "  " if line.startswith("- ") else ""
    return textwrap.wrap(
        line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _made_by(command: str, date: str) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return f"Made by `{command}` on {date} with {versions}; do not edit this page."


def _lines(rows: Sequence[Row], heads: Sequence[str]) -> list[str]:
    columns = ["architecture", "made by", *heads]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *map(_line, rows)]


def _totals(rows: Sequence[Row]) -> list[str]:
    counts = Counter(outcome["verdict"] for row in rows for outcome in row["types"].values())
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    whole = sum(good(row) for row in rows)
    head = f"**{len(rows)} architectures, {whole} of them right or refused as every type**"
    return [f"{head}; of all imports {said}."]


def _line(row: Row) -> str:
    cells = [_cell(outcome) for outcome in row["types"].values()]
    return "| " + " | ".join([row["architecture"], row["maker"], *cells]) + " |"


def _cell(outcome: dict[str, Any]) -> str:
    verdict = str(outcome["verdict"])
    if verdict != Verdict.RIGHT:
        return verdict if verdict in _GOOD else f"**{verdict.upper()}**"
    held, more = (round(100 * outcome[key]) for key in ("quantized", "dequantized"))
    return f"✓ {held} + {more}" if more else f"✓ {held}" if held else "✓"


def _reasons(rows: Sequence[Row]) -> list[str]:
    lines = [f"- {row['architecture']}, {reason}" for row in rows for reason in _reasons_of(row)]
    return ["## Why not", "", *lines, ""] if lines else []


def _reasons_of(row: Row) -> list[str]:
    types: dict[tuple[str, str], list[str]] = {}
    for quant, outcome in row["types"].items():
        if outcome["reason"]:
            types.setdefault((outcome["verdict"], outcome["reason"]), []).append(quant.lower())
    return [f"{', '.join(names)}: {what}, {why}" for (what, why), names in types.items()]


def _common_reasons(rows: Sequence[Row]) -> list[str]:
    """Return a line for each reason, the names of tensors left out of it, with what it was for."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for row in rows:
        for conversion, outcome in row["types"].items():
            if outcome["reason"]:
                conversions, architectures = found.setdefault(
                    _NAME.sub("'…'", outcome["reason"]), ({}, {})
                )
                conversions[conversion] = architectures[row["architecture"]] = None
    return [
        f"- {', '.join(what)} (such as {next(iter(of))}): {why}"
        for why, (what, of) in sorted(found.items())
    ]


def _outside(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = [
        f"- {row['architecture']} (made by {row['maker']}): {row['mlx_lm']} Here: "
        + "; ".join(_reasons_of(row))
        for row in rows
    ]
    return ["## Not counted: architectures that mlx-lm itself can't run here", "", *lines]
