"""Pages in one file: what they may do and contain; the same input gives the same bytes."""

import base64
import hashlib
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from support import PYCODE
from support.checkpoints import small_tensors, write_checkpoint
from support.plotted import HOSTILE

import blobstore
from blobstore.importer.options import ImportOptions
from blobstore.importer.run import plan_import
from blobstore.names import ModelName
from blobstore.plots.treemap import treemap
from blobstore.store.local.store import Store, open_store
from blobstore.web.pages import markup_of, page_in_file, table, table_of
from blobstore.web.report import model_page, model_report, plan_page

SCRIPT = re.compile(
    r"<script(?: type=\"(?P<type>[a-z/]+)\")?[^>]*>(?P<text>.*?)</script>", re.DOTALL
)


def inlined(page: str) -> Any:
    match = re.search('<script type="application/json" id="inlined">(.*?)</script>', page)
    assert match is not None
    return json.loads(match[1])


def readable(page: str) -> str:
    (text,) = re.findall("<noscript>(.*?)</noscript>", page, re.DOTALL)
    return str(text)


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class Reader(html.parser.HTMLParser):
    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See `HTMLParser`."""
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        """See `HTMLParser`."""
        self.text += data


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("report")
    found = open_store(folder / "store")
    blobstore.import_model(PYCODE, "tiny:int4", store=found, quant="int4")
    blobstore.import_model(PYCODE, "tiny:int8", store=found, quant="int8")
    return found


@pytest.fixture(scope="module")
def page(store: Store) -> str:
    found = model_report("tiny:int4", store=store, against=str(PYCODE))
    return model_page(found, None).decode()


@given(st.text(st.characters(exclude_categories=["C", "Z"])) | st.just("<b>&amp;\"'"))
def test_texts_come_back(value: str) -> None:
    assert Reader(f"<p>{markup_of(value)}</p>").text == value


def test_hostile_texts_are_text() -> None:
    drawn = table_of(treemap([]) | {"description": HOSTILE})
    found = table(HOSTILE, [HOSTILE], [[HOSTILE]]) + drawn
    assert Reader(found).tags <= {"p", "div", "table", "thead", "tbody", "tr", "th", "td"}
    assert "\u202e" not in found


def test_only_its_own_scripts_and_style_may_run(page: str) -> None:
    (text,) = re.findall('http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    policy = dict(part.strip().split(" ", 1) for part in text.split(";"))
    scripts = [one["text"] for one in SCRIPT.finditer(page) if one["type"] != "application/json"]
    assert policy["default-src"] == "'none'"
    assert policy["script-src"].split() == [hashed(script) for script in scripts]
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    assert policy["style-src"] == hashed(style)
    assert "unsafe" not in str(policy)


def test_nothing_is_asked_of_anywhere(page: str) -> None:
    markup = SCRIPT.sub("", page).replace(" content=", " ").replace('href="#main"', "")
    assert not re.search(r"\b(src|href|action|srcset|poster|style|on[a-z]+)=", markup)
    assert not re.search(r"@import|url\(", markup)


def test_it_contains_the_answers_of_the_server(store: Store, page: str) -> None:
    data = inlined(page)
    answers = data["answers"]
    assert list(answers)[:4] == ["model", "tensors", "plots/treemap", "quality"]
    digest = str(store.manifest("tiny:int4").digest)
    assert answers["model"]["id"] == data["made"]["Manifest"] == digest
    assert answers["quality"]["against"] == PYCODE.name
    assert len(answers["quality"]["result"]["tensors"]) == len(answers["tensors"]["names"])
    assert data["scatter"]["description"].startswith("Scatter plot")
    drawn = [key for key in answers if key.startswith("plots/distribution ")]
    assert 0 < len(drawn) <= 6
    assert str(PYCODE) not in page  # a path of this machine


def test_the_same_input_gives_the_same_bytes(store: Store, page: str) -> None:
    found = model_report("tiny:int4", store=store, against=str(PYCODE), jobs=1)
    assert model_page(found, None).decode() == page
    assert inlined(model_page(found, "today").decode())["made"]["Made"] == "today"


def test_against_another_model(store: Store) -> None:
    found = model_report("tiny:int4", store=store, against=ModelName.parse("tiny:int8"))
    page = model_page(found, None).decode()
    assert inlined(page)["diff"]["a"] == "tiny:int8"
    assert "Differences from tiny:int8" in readable(page)


def test_data_never_end_their_element() -> None:
    data = {HOSTILE: HOSTILE, "answers": {}}
    page = page_in_file(HOSTILE, ("model", "report"), data, table(HOSTILE, (), ())).decode()
    assert "<img" not in page
    assert "\u202e" not in page
    assert inlined(page)[HOSTILE] == HOSTILE
    assert page.count("</script>") == 4


def test_a_plan_shows_all_types(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", small_tensors())
    words = {"quant": "int8", "group_size": 32}
    asked = plan_import(source, **words)  # type: ignore[arg-type]
    options = ImportOptions.parse(**words)  # type: ignore[arg-type]
    page = plan_page(asked, options).decode()
    data = inlined(page)["answers"]["plan"]
    labels = [one["label"] for one in data["plans"]]
    assert {"int4/32", "int8/128", "nvfp4/16", "unquantized"} < set(labels)
    assert (data["refused"], data["asked"], data["target"]) == ({}, "int8/32", None)
    for one in data["plans"]:
        kind = None if one["type"] == "unquantized" else one["type"]
        alone = plan_import(source, quant=kind, group_size=int(one["groups"] or 0) or None)
        assert (alone.stored_bytes, f"{alone.bits_per_weight:.2f}") == (one["bytes"], one["bits"])
    assert page == plan_page(asked, options).decode()
    assert str(tmp_path) not in page
    text = Reader(readable(page)).text
    assert all(label in text for label in labels)
    asked = plan_import(source, target_bpw=9)
    answers = inlined(plan_page(asked, ImportOptions.parse()).decode())["answers"]
    assert answers["plan"]["target"]["bytes"] == asked.stored_bytes
