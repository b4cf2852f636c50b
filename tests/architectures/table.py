"""The pages as Markdown, from the rows."""

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from architectures.compare import TYPES, Verdict
from architectures.converted import CONVERSIONS
from architectures.rows import LOADED, Row

_GOOD = {Verdict.RIGHT, Verdict.REFUSED, Verdict.NOT_COMPARED}
_BAD = {Verdict.WRONG, Verdict.CRASHED}
_PACKAGES = ("mlx-lm", "mlx", "transformers")
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
- *Refused*: `plan` and `import` say why, and nothing is written."""
_CONVERTED = """\
Each row is a checkpoint of [the table of architectures](architectures.md). mlx-lm's own code has
converted it, as `mlx_lm.convert` does, and it is imported as it is.

- ✓: the network loaded from the store, and the folder exported for mlx-lm, have each parameter of
  the converted folder, and give the same logits, bit for bit. The number is as there.
- *Refused*: `plan` and `import` name a tensor and say why.
- *Not compared*: mlx-lm can't convert or load the checkpoint.

Bailing with `norm_head` is not in the table: mlx-lm 0.32.2 quantizes its head, and divides the
codes by norms when it loads them. From a store mlx-lm gets the head's values."""


def good(row: Row) -> bool:
    """Return whether each type is right, or refused at plan time where mlx-lm runs the model."""
    found = {outcome["verdict"] for outcome in row["types"].values()}
    return found <= _GOOD if row["mlx_lm"] == LOADED else not found & _BAD


def table(rows: Sequence[Row], date: str) -> str:
    counted = [row for row in rows if row["mlx_lm"] == LOADED]
    others = [
        f"- {row['architecture']} (made by {row['maker']}): {row['mlx_lm']}"
        for row in rows
        if row not in counted
    ]
    heads = [str(quant or "none") for quant in TYPES]
    page = _page("Architectures", "python tests/architectures", date, _INTRODUCTION, counted, heads)
    title = "## Not counted: architectures that mlx-lm itself can't run here"
    return page + _joined([title, "", *others, ""] if others else [])


def converted_table(rows: Sequence[Row], date: str) -> str:
    command = "python tests/architectures --converted"
    return _page("Converted by mlx-lm", command, date, _CONVERTED, rows, list(CONVERSIONS))


def _page(
    title: str, command: str, date: str, says: str, rows: Sequence[Row], heads: Sequence[str]
) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    made = f"Made by `{command}` on {date} with {versions}; do not edit this page."
    verdicts = Counter(outcome["verdict"] for row in rows for outcome in row["types"].values())
    counts = ", ".join(f"{verdicts[one]} {one}" for one in Verdict if verdicts[one])
    whole = f"{sum(map(good, rows))} of them right or refused as every type"
    columns = ["architecture", "made by", *heads]
    lines = [f"# {title}", "", made, "", *says.split("\n"), ""]
    lines += [f"**{len(rows)} architectures, {whole}**; of all imports {counts}.", ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [row["architecture"], row["maker"], *map(_cell, row["types"].values())]
        lines.append("| " + " | ".join(cells) + " |")
    return _joined([*lines, "", "## Why not", "", *_reasons(rows), ""])


def _joined(lines: Sequence[str]) -> str:
    found = []
    for line in lines:
        if line.startswith(("|", "#")) or not line:
            found.append(line)
            continue
        indent = "  " if line.startswith("- ") else ""
        found += textwrap.wrap(
            line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(found)


def _cell(outcome: dict[str, Any]) -> str:
    verdict = str(outcome["verdict"])
    if verdict != Verdict.RIGHT:
        return verdict if verdict in _GOOD else f"**{verdict.upper()}**"
    held, more = (round(100 * outcome[key]) for key in ("quantized", "dequantized"))
    return f"✓ {held} + {more}" if more else f"✓ {held}" if held else "✓"


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Return a line for each reason, with names of tensors left out, and all that it is for."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for row in rows:
        for quant, outcome in row["types"].items():
            if outcome["reason"]:
                reason = f"{outcome['verdict']}, " + re.sub(r"'[^']+'", "'…'", outcome["reason"])
                types, architectures = found.setdefault(reason, ({}, {}))
                types[quant.lower()] = architectures[row["architecture"]] = None
    return [
        f"- {'; '.join(of)} as {', '.join(types)}: {why}"
        for why, (types, of) in sorted(found.items())
    ]
