"""Specifications: the Vega documents of ``specifications/``, filled with values.

Vega draws; Python only fills in tables of data, domains of scales, signals, and the same values as
text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any, Literal

from blobstore.errors import needs
from blobstore.views.quantities import cut_text, printable

Theme = Literal["light", "dark"]
Specification = dict[str, Any]
"""A Vega specification: JSON, ready to be parsed by Vega 6."""
SCALE = 2
"""Pixels of a picture for each of a page."""
WIDTH = 960
"""Pixels; a page sets the signal ``width`` to the room that it has."""
COLOURS = {
    "int4": "#0a74c4",
    "int8": "#008a8a",
    "nvfp4": "#d4570a",
    "mxfp4": "#a97000",
    "mxfp8": "#b8518f",
    "BF16": "#6f7783",
    "F16": "#7d6ad8",
    "F32": "#3f8f3a",
    "F8": "#c8475b",
    "integers": "#8b6b52",
    "other": "#7a7a5c",
}
"""The colours that mean a type of weights: one each, in every plot and theme.

Each has a contrast of at least 3 against a white and against a dark page (WCAG 2.2, 1.4.11), and
black or white text has at least 4.5 on it (1.4.3). The hues are those of Okabe and Ito's palette
for the colour-blind, darker or lighter where the contrast asks for it. No plot relies on colour
alone: names of types are in labels, tooltips and tables.
"""
_Values = Mapping[str, Any]
_NOTHING: _Values = {}
# Names that Vega 6 loses: it keeps axis labels as keys of a JavaScript object (DataJoin).
_KEYS = {"__proto__": "__proto__ "}


def family_of_type(type_name: str) -> str:
    """Return the type that gives a type its colour: ``int4`` of ``int4/64``."""
    name = type_name.partition("/")[0]
    if name in COLOURS:
        return name
    if name.startswith("F8"):
        return "F8"
    return "integers" if name.startswith(("BOOL", "I", "U")) else "other"


def specification(
    name: str,
    description: str,
    *,
    height: int,
    table: tuple[Sequence[str], Iterable[Sequence[Any]]] = ((), ()),
    data: _Values = _NOTHING,
    domains: _Values = _NOTHING,
    signals: _Values = _NOTHING,
) -> Specification:
    """Return the document ``name`` with values.

    Width and height are all that the plot takes, its axes and legends included. ``table``: the same
    values as text, names of columns and rows. ``data``, ``domains``, ``signals``: values by the
    names that the document gives; ``type`` of a row is what `family_of_type` returns. Characters of
    names that are not printable are escaped.
    """
    parts: dict[str, Any] = json.loads(_template(name))
    for one in parts.get("data", ()):
        if "values" in one:
            one["values"] = _readable(data.get(one["name"], ()))
    used = {row.get("type") for rows in data.values() for row in rows}
    types = [kind for kind in COLOURS if kind in used]
    for one in parts.get("scales", ()):
        if one["name"] in domains:
            one["domain"] = _readable(domains[one["name"]])
        if one["name"] in ("type", "shape"):
            one["domain"] = types
        if one["name"] == "type":
            one["range"] = [COLOURS[kind] for kind in types]
    for one in parts.get("signals", ()):
        one["value"] = signals.get(one["name"], one["value"])
    columns, rows = table
    return {
        "$schema": "https://vega.github.io/schema/vega/v6.json",
        "description": _readable(description),
        "width": WIDTH,
        "height": height,
        "autosize": {"type": "fit", "contains": "padding", "resize": True},
        "padding": 4,
        **parts,
        "usermeta": {"table": {"columns": list(columns), "rows": _readable(list(rows))}},
    }


def empty(description: str, sentence: str) -> Specification:
    """Return a plot of no values: a sentence."""
    return specification("empty", description, height=60, signals={"sentence": sentence})


def themes() -> dict[Theme, dict[str, Any]]:
    """Return Vega's configurations: all colours and fonts that do not mean a type.

    A page passes one when it parses a specification: ``vega.parse(specification, configuration)``.
    """
    configurations: dict[Theme, dict[str, Any]] = json.loads(_template("themes"))
    return configurations


@cache
def _template(name: str) -> str:
    file = resources.files("blobstore.plots").joinpath("specifications", f"{name}.json")
    return file.read_text("utf-8")


def _readable(value: Any) -> Any:
    """Return a value with what names from files would do to a line of text as escapes.

    Very long texts are cut: a name of 10,000 characters would be laid out for seconds.
    """
    if isinstance(value, str):
        return cut_text(_KEYS.get(value) or printable(value, keep="\n"))
    if isinstance(value, Mapping):
        return {key: _readable(one) for key, one in value.items()}
    return [_readable(one) for one in value] if isinstance(value, list | tuple) else value


def tip_of(*lines: str) -> str:
    """Return the text that a page shows for the mark under the pointer; names break no line."""
    return "\n".join(map(printable, lines))


def drawn_png(plot: Specification, theme: Theme = "light") -> bytes:
    """Return a plot as a PNG file. Raises: UsageError when vl-convert is not installed."""
    spec = plot | {"config": themes()[theme]}
    return bytes(check_drawable().vega_to_png(spec, scale=SCALE, allowed_base_urls=[]))


def check_drawable() -> ModuleType:
    """Return vl-convert. Raises: UsageError when it is not installed."""
    with needs("plots", "vl-convert is not installed"):
        import vl_convert
    return vl_convert
