"""Elements of HTML, in which every text is escaped.

A child that is a `str` is text; only `Html` is markup. So a name from a file can't become markup.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from blobstore.views.quantities import printable

_VOID = frozenset({"meta", "br"})


class Html(str):
    """Markup, made by the functions of this module."""

    __slots__ = ()


def text(value: str) -> Html:
    """Return a text as markup; characters that are not printable are shown as escapes."""
    return Html(html.escape(printable(value, keep="\n")))


def tag(name: str, /, *children: str, **attributes: str) -> Html:
    """Return an element. ``attributes``: by name, ``_`` for ``-``; ``class_`` is ``class``."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items()
    )
    if name in _VOID:
        return Html(f"<{name}{words}>")
    return Html(f"<{name}{words}>{joined(children)}</{name}>")


def joined(children: Iterable[str]) -> Html:
    """Return children one after the other."""
    return Html("".join(one if isinstance(one, Html) else text(one) for one in children))


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return names and values as a list of descriptions; pairs without a value are left out."""
    rows = (tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value)
    return tag("dl", joined(rows))


def table(label: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """Return a table of texts and numbers in a box that scrolls; numbers are right-aligned."""
    head = tag("tr", joined(tag("th", column, scope="col") for column in columns))
    body = joined(tag("tr", joined(map(_cell, row))) for row in rows)
    drawn = tag("table", tag("thead", head), tag("tbody", body))
    return tag("div", drawn, class_="scrolls", role="region", aria_label=label, tabindex="0")


def _cell(value: object) -> Html:
    shown = f"{value:,}" if isinstance(value, int) else str(value)
    is_number = shown[:1].isdigit() or (shown[:1] == "-" and shown[1:2].isdigit())
    return tag("td", shown, class_="number") if is_number else tag("td", shown)


def section(title: str, *children: str, **attributes: str) -> Html:
    """Return a section with a heading."""
    return tag("section", tag("h2", title), *children, **attributes)
