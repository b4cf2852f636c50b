"""The frame of a page in one file: its style, its scripts and its plots, and what it may do.

The page allows its own script and style by their hashes, and nothing else: no request, no `eval`,
no other script. Its plots are data in JSON, in which no ``<`` is left to end an element.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from blobstore.plots.specification import Specification
from blobstore.plots.theme import THEMES, configuration
from blobstore.report.elements import Html, side_by_side, table, tag

_VEGA = ("web", "static", "vendor")
_LONGEST_TITLE = 200


def document(title: str, body: Iterable[str], plots: Mapping[str, Specification]) -> bytes:
    """Return a page in HTML, UTF-8. ``plots``: by the names that `figure` has."""
    style = _file("report", "page.css")
    scripts = [_file(*_VEGA, "vega.min.js"), _program()]
    policy = "; ".join(
        [
            "default-src 'none'",
            "script-src " + " ".join(map(_hash, scripts)),
            f"style-src {_hash(style)}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    drawn = {name: _without_table(plot) for name, plot in plots.items()}
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title[:_LONGEST_TITLE]),
        Html(f"<style>{style}</style>"),
    )
    data = (
        _data("configurations", {theme: configuration(theme) for theme in THEMES}),
        _data("plots", drawn),
        Html(f"<script>{scripts[0]}</script>"),
        Html(f'<script type="module">{scripts[1]}</script>'),
    )
    page = tag(
        "html", tag("head", *head), tag("body", tag("main", side_by_side(body)), *data), lang="en"
    )
    return f"<!doctype html>\n{page}\n".encode()


def figure(name: str, plot: Specification, **attributes: str) -> Html:
    """Return the place of a plot, its description, and its values as a table."""
    values = plot["usermeta"]["table"]
    parts = [tag("div", class_="plot"), tag("figcaption", plot["description"])]
    if values["rows"]:
        shown = table(plot["description"], values["columns"], values["rows"])
        parts.append(tag("details", tag("summary", "The values as a table"), shown))
    return tag("figure", *parts, data_plot=name, **attributes)


def _without_table(plot: Specification) -> dict[str, Any]:
    return {key: value for key, value in plot.items() if key != "usermeta"}


def _data(name: str, value: Any) -> Html:
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{name}">{text}</script>')


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@cache
def _program() -> str:
    """Return Vega's interpreter of expressions and our script, as one module."""
    return _file(*_VEGA, "vega-interpreter.js") + _file("report", "page.js")


@cache
def _file(*names: str) -> str:
    return resources.files("blobstore").joinpath(*names).read_text("utf-8")
