"""Pages: what the shell contains, as the server sends them, and in one file.

A page in one file has the same markup, script and style. It gets the server's answers as data, asks
no server, and allows its own scripts and style by their hashes, and nothing else: no request, no
`eval`, no other script. Its data are JSON, in which no ``<`` is left to end an element. A browser
without JavaScript shows tables of the same values.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from blobstore.plots.specification import COLOURS, Specification, themes
from blobstore.views.quantities import cut_text, printable

FOLDER = Path(__file__).parent / "static"
PAGES: Mapping[str, tuple[str, str]] = {
    "/": ("models", "Models"),
    "/model": ("model", "Model"),
    "/compare": ("compare", "Compare"),
    "/plan": ("plan", "Plan"),
    "/usage": ("usage", "Usage"),
}
"""The addresses of pages: the names of their part and their script, and their titles."""
_LOST = ("lost", "Not found")
TYPES = "types.css"
_STYLES: tuple[str, ...] = (
    "css/base.css",
    "css/controls.css",
    TYPES,
    "css/tables.css",
    "css/plots.css",
    "css/pages.css",
    "css/narrow.css",
)
_EARLY, _VEGA = "js/theme-early.js", "vendor/vega.min.js"
_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w-]+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


def page(address: str) -> str:
    """Return a page as the server sends it; for an address without one, the page that says so."""
    name, title = PAGES.get(address, _LOST)
    links = (f'<link rel="stylesheet" href="/static/{style}" />' for style in _STYLES)
    here = f'<a href="{address}"'
    return _read("shell.html").format(
        title=f"{title} · blobstore",
        head='<link rel="icon" href="/static/icon.svg" type="image/svg+xml" />'
        f'{"".join(links)}<script src="/static/{_EARLY}"></script>'
        f'<script type="module" src="/static/js/{name}.js"></script>',
        site=_read("site.html").replace(f"<li>{here}", f'<li>{here} aria-current="page"'),
        noscript='<p class="failure">These pages need JavaScript.</p>',
        main=_read(f"{name}.html"),
        end="",
    )


def page_in_file(
    title: str, parts: Sequence[str], data: Mapping[str, Any], readable: Iterable[str]
) -> bytes:
    """Return a page in one file, UTF-8, made of these parts and the script of the last one.

    ``data``: what the script finds, as JSON. ``readable``: markup for browsers without JavaScript.
    """
    style = "".join(colours_of_types() if one == TYPES else _read(one) for one in _STYLES)
    scripts = [_read(_EARLY), _read(_VEGA), _program(f"{parts[-1]}.js")]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))};"
        f" style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    known = {**data, "themes": themes()}
    text = json.dumps(known, separators=(",", ":")).replace("<", "\\u003c")
    return (
        _read("shell.html")
        .format(
            title=markup_of(title),
            head=f'<meta http-equiv="Content-Security-Policy" content="{policy}" />'
            f"<style>{style}</style><script>{scripts[0]}</script>",
            site="",
            noscript="".join(readable),
            main="".join(_read(f"{part}.html") for part in parts),
            end=f'<script type="application/json" id="inlined">{text}</script>'
            f'<script>{scripts[1]}</script><script type="module">{scripts[2]}</script>',
        )
        .encode()
    )


def colours_of_types() -> str:
    """Return the style sheet with the colours of types, as plots have them."""
    return "".join(f".type-{n.lower()} {{ --type: {c}; }}\n" for n, c in COLOURS.items())


def markup_of(value: object) -> str:
    """Return a value as text of a page; characters that are not printable are shown as escapes."""
    return html.escape(cut_text(printable(str(value), keep="\n")))


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return values as a table of texts, with its caption."""
    head = "".join(f'<th scope="col">{markup_of(column)}</th>' for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{markup_of(one)}</td>' for one in row)}</tr>" for row in rows
    )
    text = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<p>{markup_of(caption)}</p><div class="table">{text}</div>'


def table_of(plot: Specification) -> str:
    """Return the values of a plot as a table."""
    values = plot["usermeta"]["table"]
    return table(plot["description"], values["columns"], values["rows"])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _program(name: str) -> str:
    """Return a script with all that it imports, as one module."""
    interpreter = _read("vendor/vega-interpreter.js").partition("export {")[0]
    modules: dict[str, str] = {}
    _bundle(name, modules)
    start = f"{interpreter}\nwindow.expressionInterpreter = expression;\nconst modules = {{}};\n"
    return start + "".join(modules.values())


def _bundle(name: str, modules: dict[str, str]) -> None:
    """Add a module to ``modules``, after those that it imports, as a function's body."""
    text = _read(f"js/{name}")
    for _, other in _IMPORT.findall(text):
        if other not in modules:
            _bundle(other, modules)
    names = ", ".join(exported for _, exported in _EXPORT.findall(text))
    text = _EXPORT.sub(r"\1", _IMPORT.sub(r'const { \1 } = modules["\2"];', text))
    modules[name] = f'modules["{name}"] = (() => {{\n{text}\nreturn {{ {names} }};\n}})();\n'


@cache
def _read(name: str) -> str:
    return (FOLDER / name).read_text("utf-8").rstrip("\n")
