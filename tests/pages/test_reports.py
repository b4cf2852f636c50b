"""Reports and plans in Chromium, from a file: drawn, quiet, narrow, dark, and inert."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pages.browser import NARROW, WIDE, Theme, Watched, watched
from support import PYCODE, PYCODE_MOE
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.plotted import SPECIFICATIONS

import blobstore
from blobstore.cli.main import run
from blobstore.plots.specification import themes
from blobstore.store.local.store import Store
from blobstore.web.pages import page_in_file

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.lab

ODD_NAMES = (
    *("__proto__.weight", "constructor", "<!--<script>", " ", "nul\x00.weight"),
    *("a\u2028b\u2029.weight", "\u202eevil\u2066.weight"),
    *("L" * 10_000 + ".weight", f"model.layers.0.{'é' * 3000}.weight"),
)
EVIL = "model.layers.0.<img src=x onerror=alert(1)></script><script>alert(2)//.weight"
PNG = b"\x89PNG\r\n\x1a\n"


def opened(site: Watched, path: Path) -> Page:
    page = site.page
    page.goto(path.as_uri())
    site.settle()
    page.wait_for_function(
        "() => [...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('svg'))"
    )
    return page


def overflows(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


@pytest.mark.parametrize(("size", "theme"), [(WIDE, "light"), (NARROW, "dark")])
def test_all_is_drawn(
    browser: Browser, tmp_path: Path, size: tuple[int, int], theme: Theme
) -> None:
    answers = {f"plots/distribution {name}": spec for name, spec in SPECIFICATIONS.items()}
    data = {"name": "", "answers": answers, "diff": None, "scatter": None, "made": {}}
    path = tmp_path / "plots.html"
    path.write_bytes(page_in_file("plots", ("model", "report"), data, ""))
    with watched(browser, tmp_path.as_uri(), size=size, theme=theme) as site:
        page = opened(site, path)
        assert page.locator(".plot svg").count() == len(SPECIFICATIONS)  # `opened` waits for them
        assert not overflows(page)
        assert "alert(1)" in page.inner_text("main")


def test_a_report_is_drawn_and_accessible(browser: Browser, store: Store, tmp_path: Path) -> None:
    blobstore.import_model(PYCODE_MOE, "m", store=store, quant="nvfp4")
    path = tmp_path / "report.html"
    words = ["report", "m", "--against", str(PYCODE_MOE), "-o", str(path)]
    assert run([*words, "--png", str(tmp_path / "p"), "--store", str(store.root)]) == 0
    pictures = {one.stem: one.read_bytes() for one in (tmp_path / "p").iterdir()}
    assert {"treemap", "errors", "scatter", "distribution-1"} <= set(pictures)
    assert all(data.startswith(PNG) for data in pictures.values())
    for theme in themes():
        with watched(browser, tmp_path.as_uri(), theme=theme) as site:
            page = opened(site, path)
            assert page.locator(".plot svg text").count() > 50
            assert site.violations() == []
            page.set_viewport_size({"width": 390, "height": 800})
            page.wait_for_function("document.querySelector('.plot svg').clientWidth <= 390")
            page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")


def test_hostile_names_are_drawn_and_do_not_run(
    browser: Browser, store: Store, tmp_path: Path
) -> None:
    tensors = {**small_tensors(), EVIL: normal("evil", 64, 128)}
    tensors |= {name: normal(name, 64, 64) for name in ODD_NAMES}
    source = write_checkpoint(tmp_path / "<b>source", tensors)
    blobstore.import_model(source, "m", store=store, quant="int4")
    report, plan = tmp_path / "report.html", tmp_path / "plan.html"
    words = ["report", "m", "--against", str(source), "-o", str(report)]
    assert run([*words, "--png", str(tmp_path / "p"), "--store", str(store.root)]) == 0
    assert run(["plan", str(source), "--quant", "int4", "--html", str(plan)]) == 0
    for path in (report, plan):
        with watched(browser, tmp_path.as_uri(), size=NARROW) as site:
            page = opened(site, path)
            assert not overflows(page)
            for folded in page.locator("summary").all():
                site.unfold(folded)
            site.expect(page.locator("img, b")).to_have_count(0)
            assert EVIL.split(".")[3] in (page.text_content("main") or "")


def test_a_plan_changes_with_its_controls(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert run(["plan", str(PYCODE), "--quant", "int8", "--html", str(path)]) == 0
    with watched(browser, tmp_path.as_uri()) as site:
        page = opened(site, path)
        plan = page.locator("#plan")
        heading = plan.locator("h2")
        site.expect(heading).to_have_text("int8/64")
        fits = page.get_by_role("columnheader", name="Fits the target")
        site.expect(fits).to_have_count(0)
        page.get_by_role("link", name="mxfp4/32").press("Enter")
        site.expect(heading).to_have_text("mxfp4/32")
        assert page.url.endswith("plan.html#mxfp4-32")
        page.get_by_role("combobox", name="Type").select_option("int8")
        page.get_by_role("combobox", name="Groups").select_option("128")
        site.expect(heading).to_have_text("int8/128")
        plan.locator(".plot svg").wait_for()
        target = page.get_by_label("Target size")
        target.fill("6.0MB")
        site.expect(fits).to_have_count(1)
        rows = [row.split("\t") for row in page.locator("#plans tbody tr").all_inner_texts()]
        found = {row[0]: row[2] for row in rows}
        assert (found["nvfp4/16"], found["int8/64"]) == ("yes", "no")
        answer = page.locator("output[name=answer]")
        assert "Possible" in answer.inner_text()
        for text, said in {"1MB": "Too small", "9GB": "as it is", "x": "Write a size"}.items():
            target.fill(text)
            assert said in answer.inner_text()
        assert site.violations() == []
