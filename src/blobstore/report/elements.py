"""Elements of HTML, in which every text is escaped.

A child that is a `str` is text; only `Html` is markup. So a name from a file can't become markup.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from blobstore.views.quantities import cut_text, printable

_LONGEST = 3000
_WORD = 16
_VOID = frozenset({"meta", "input"})


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
    return tag("dl", side_by_side(rows))


def table(label: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Html:
    """Return a table of texts and numbers in a box that scrolls.

    Columns of numbers are right-aligned, as their first row says.
    """
    kinds = ["number" if _is_number(value) else "" for value in (rows[0] if rows else columns)]
    head = tag(
        "tr",
        side_by_side(
            tag("th", column, scope="col", **_classed(kind))
            for column, kind in zip(columns, kinds, strict=True)
        ),
    )
    body = side_by_side(
        tag(
            "tr",
            side_by_side(
                tag("td", _shown(value), **_classed(kind or _length(value)))
                for value, kind in zip(row, kinds, strict=True)
            ),
        )
        for row in rows
    )
    drawn = tag("table", tag("thead", head), tag("tbody", body))
    return tag("div", drawn, class_="scrolls", role="region", aria_label=label, tabindex="0")


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else cut_text(str(value))


def _is_number(value: object) -> bool:
    return _shown(value).removeprefix("-")[:1].isdigit()


def _length(value: object) -> str:
    """Return the class of texts that may be broken anywhere, such as names of tensors."""
    return "long" if len(_shown(value)) > _WORD else ""


def _classed(kind: str) -> dict[str, str]:
    return {"class_": kind} if kind else {}


def section(title: str, *children: str, **attributes: str) -> Html:
    """Return a section with a heading."""
    return tag("section", tag("h2", title), *children, **attributes)
