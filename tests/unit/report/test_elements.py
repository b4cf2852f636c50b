"""Elements: a text never becomes markup."""

from __future__ import annotations

import html.parser

import pytest
from hypothesis import given, strategies as st
from support.plotted import HOSTILE

from blobstore.report.page import Html, facts, section, side_by_side, table, tag


class Reader(html.parser.HTMLParser):
    """Notes the tags, attributes and texts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str | None] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See `HTMLParser`."""
        self.tags.append(tag)
        self.attributes += [value for _, value in attrs]

    def handle_data(self, data: str) -> None:
        """See `HTMLParser`."""
        self.text += data


def read(markup: str) -> Reader:
    reader = Reader()
    reader.feed(markup)
    reader.close()
    return reader


@given(st.text(st.characters(exclude_categories=["C", "Z"])) | st.just("<b>&amp;\"'"))
def test_texts_come_back(value: str) -> None:
    reader = read(tag("p", value, title=value))
    assert (reader.tags, reader.attributes, reader.text) == (["p"], [value], value)


@pytest.mark.parametrize(
    "markup",
    [
        tag("p", HOSTILE, title=HOSTILE),
        facts([(HOSTILE, HOSTILE)]),
        table(HOSTILE, [HOSTILE], [[HOSTILE]]),
        section(HOSTILE, HOSTILE, id=HOSTILE),
        side_by_side([HOSTILE, tag("b", HOSTILE)]),
    ],
)
def test_hostile_texts_are_text(markup: Html) -> None:
    allowed = {
        "p",
        "dl",
        "div",
        "dt",
        "dd",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "section",
        "h2",
        "b",
    }
    assert set(read(markup).tags) <= allowed
    assert "\u202e" not in markup


def test_attributes_are_named_as_html_names_them() -> None:
    assert tag("input", class_="a", data_key="1") == '<input class="a" data-key="1">'


def test_columns_of_numbers_are_marked() -> None:
    markup = table("t", ["name", "size"], [["1a", 5], ["b", -6]])
    assert markup.count('class="number"') == 6
    assert '<th scope="col" class="number">size</th>' in markup
