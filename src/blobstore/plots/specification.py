"""The frame of every specification: its size, its description, the same values as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blobstore.plots.palette import COLOURS, OTHER, families
from blobstore.views.quantities import cut_text, printable

Specification = dict[str, Any]
"""A Vega specification: JSON, ready to be parsed by Vega 6."""

SCHEMA = "https://vega.github.io/schema/vega/v6.json"
"""The name of the format; Vega does not fetch it."""
WIDTH = 960
"""Pixels; a page sets the signal ``width`` to the room that it has."""
NARROW = 560
"""Pixels under which plots leave out labels, and shorten titles."""


def specification(
    description: str,
    *,
    height: int,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    **parts: Any,
) -> Specification:
    """Return a specification of marks, scales and data, which are its ``parts``.

    Width and height are all that the plot takes, its axes and legends included. ``columns`` and
    ``rows`` are the same values as a table. Characters of names that are not printable are escaped.
    """
    found: Specification = {
        "$schema": SCHEMA,
        "description": description,
        "width": WIDTH,
        "height": height,
        "autosize": {"type": "fit", "contains": "padding", "resize": True},
        "padding": 4,
        **parts,
        "usermeta": {"table": {"columns": list(columns), "rows": [list(row) for row in rows]}},
    }
    return {key: _readable(value) for key, value in found.items()}


_KEYS = {"__proto__": "__proto__ "}
"""Names that Vega 6 loses: it keeps axis labels as keys of a JavaScript object (DataJoin)."""

_PROGRAMS = {"signal", "expr"}
"""Keys of expressions, which contain no names."""


def _readable(value: Any) -> Any:
    """Return a value with what names from files would do to a line of text as escapes.

    Very long texts are cut: a name of 10,000 characters would be laid out for seconds.
    """
    if isinstance(value, str):
        return cut_text(_KEYS.get(value) or printable(value, keep="\n"))
    if isinstance(value, dict):
        return {key: one if key in _PROGRAMS else _readable(one) for key, one in value.items()}
    return [_readable(one) for one in value] if isinstance(value, list | tuple) else value


def tip_of(*lines: str) -> str:
    """Return the text that a page shows for the mark under the pointer; names break no line."""
    return "\n".join(map(printable, lines))


def colour_scale(type_names: Iterable[str]) -> dict[str, Any]:
    """Return the scale ``type`` from families of types to their colours."""
    found = families(type_names)
    colours = [COLOURS.get(name, OTHER) for name in found]
    return {"name": "type", "type": "ordinal", "domain": found, "range": colours}


def type_legend(**channels: str) -> dict[str, Any]:
    """Return the legend of the scale ``type``: a line above the plot, several if it is narrow."""
    return {
        "orient": "top",
        "direction": "horizontal",
        "columns": {"signal": f"width < {NARROW} ? 3 : 0"},
        **(channels or {"fill": "type"}),
        "symbolType": "square",
    }


def size_labels() -> dict[str, Any]:
    """Return the encoding of an axis's labels as sizes: ``5.9 MB``."""
    text = "replace(format(datum.value, '.3~s'), regexp('[kMGTP]?$'), ' $&B')"
    return {"labels": {"update": {"text": {"signal": f"upper({text})"}}}}


def empty(description: str, sentence: str) -> Specification:
    """Return a plot of no values: a sentence."""
    text = {
        "x": {"signal": "width / 2"},
        "y": {"signal": "height / 2"},
        "align": {"value": "center"},
        "text": {"value": sentence},
    }
    mark = {"type": "text", "style": "guide-title", "encode": {"update": text}}
    return specification(description, height=60, columns=(), rows=(), marks=[mark])
