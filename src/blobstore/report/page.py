"""A page in one file: elements of HTML, the style and scripts of the pages, plots as data.

A child that is a `str` is text; only `Html` is markup. So a name from a file can't become markup.
The page allows its own script and style by their hashes, and nothing else: no request, no `eval`,
no other script. Its plots are data in JSON, in which no ``<`` is left to end an element.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from blobstore.plots.specification import Specification
from blobstore.plots.theme import THEMES, configuration
from blobstore.views.quantities import cut_text, printable

_LONGEST, _LONGEST_TITLE = 3000, 200
_VOID = frozenset({"meta", "input"})
_STYLES = ("base", "tables", "plots", "report")
_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w-]+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


class Html(str):
    """Markup, made by the functions of this module."""

    __slots__ = ()


def markup_of(value: str) -> Html:
    """Return a text as markup; characters that are not printable are shown as escapes.

    A very long text is cut: browsers take seconds to lay out one without spaces.
    """
    return Html(html.escape(cut_text(printable(value, keep="\n"), _LONGEST)))


def tag(name: str, /, *children: str, **attributes: str) -> Html:
    """Return an element. ``attributes``: by name, ``_`` for ``-``; ``class_`` is ``class``."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{markup_of(value)}"'
        for key, value in attributes.items()
    )
    if name in _VOID:
        return Html(f"<{name}{words}>")
    return Html(f"<{name}{words}>{side_by_side(children)}</{name}>")


def side_by_side(children: Iterable[str]) -> Html:
    """Return children one after the other."""
    return Html("".join(one if isinstance(one, Html) else markup_of(one) for one in children))


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return names and values as a list of descriptions; pairs without a value are left out."""
    rows = (tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value)
    return tag("dl", side_by_side(rows), class_="facts")


def table(label: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Html:
    """Return a table of texts and numbers.

    Columns of numbers are right-aligned, as their first row says.
    """
    texts = [
        [f"{one:,}" if isinstance(one, int) else cut_text(str(one)) for one in r] for r in rows
    ]
    kinds: list[dict[str, str]] = [
        {"class_": "number"} if text.removeprefix("-")[:1].isdigit() else {}
        for text in (texts[0] if texts else columns)
    ]
    head = [tag("th", one, scope="col", **k) for one, k in zip(columns, kinds, strict=True)]
    body = [
        tag("tr", *(tag("td", one, **k) for one, k in zip(row, kinds, strict=True)))
        for row in texts
    ]
    return scrolling(label, head, body)


def scrolling(label: str, head: Iterable[Html], rows: Iterable[Html]) -> Html:
    """Return a table in a box that scrolls."""
    drawn = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows))
    return tag("div", drawn, class_="table", role="region", aria_label=label, tabindex="0")


def section(title: str, *children: str, **attributes: str) -> Html:
    """Return a section with a heading."""
    return tag("section", tag("h2", title), *children, **attributes)


def folded(summary: str, content: Html) -> Html:
    """Return what is shown when its summary is followed."""
    return tag("details", tag("summary", summary), content, class_="twin")


def figure(name: str, plot: Specification, **attributes: str) -> Html:
    """Return the place of a plot, its description, and its values as a table."""
    values, says = plot["usermeta"]["table"], plot["description"]
    parts = [tag("div", class_="place"), tag("figcaption", says)]
    if values["rows"]:
        parts.append(
            folded("The values as a table", table(says, values["columns"], values["rows"]))
        )
    return tag("figure", *parts, data_plot=name, **attributes)


def document(title: str, body: Iterable[str], plots: Mapping[str, Specification]) -> bytes:
    """Return a page in HTML, UTF-8. ``plots``: by the names that `figure` has."""
    style = "".join(_file("css", f"{name}.css") for name in _STYLES)
    scripts = [_file("vendor", "vega.min.js"), _program()]
    policy = [
        "default-src 'none'",
        "script-src " + " ".join(map(_hash, scripts)),
        f"style-src {_hash(style)}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content="; ".join(policy)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title[:_LONGEST_TITLE]),
        Html(f"<style>{style}</style>"),
    )
    drawn = {
        name: {key: value for key, value in plot.items() if key != "usermeta"}
        for name, plot in plots.items()
    }
    data = (
        _data("themes", {theme: configuration(theme) for theme in THEMES}),
        _data("plots", drawn),
        Html(f"<script>{scripts[0]}</script>"),
        Html(f'<script type="module">{scripts[1]}</script>'),
    )
    whole = tag("body", tag("main", *body), *data)
    return f"<!doctype html>\n{tag('html', tag('head', *head), whole, lang='en')}\n".encode()


def _data(name: str, value: Any) -> Html:
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{name}">{text}</script>')


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _program() -> str:
    """Return the script ``report.js`` with all that it imports, as one module."""
    interpreter = _file("vendor", "vega-interpreter.js").partition("export {")[0]
    modules: dict[str, str] = {}
    _bundle("report.js", modules)
    return (
        f"{interpreter}window.expressionInterpreter = expression;\nconst modules = {{}};\n"
        + "".join(modules.values())
    )


def _bundle(name: str, modules: dict[str, str]) -> None:
    """Add a module to ``modules``, behind those that it imports, as a function's body."""
    text = _file("js", name)
    for _, other in _IMPORT.findall(text):
        if other not in modules:
            _bundle(other, modules)
    names = ", ".join(exported for _, exported in _EXPORT.findall(text))
    text = _EXPORT.sub(r"\1", _IMPORT.sub(r'const { \1 } = modules["\2"];', text))
    modules[name] = f'modules["{name}"] = (() => {{\n{text}return {{ {names} }};\n}})();\n'


@cache
def _file(*names: str) -> str:
    return resources.files("blobstore").joinpath("web", "static", *names).read_text("utf-8")
