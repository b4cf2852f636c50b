"""The page of all models: filter, sort, theme, keyboard, broken ones, an empty store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.browser import NARROW, Watched, watched
from support.page_store import BROKEN, DENSE, HOSTILE, LARGE, MIXTURE, served

from blobstore.store.local.store import open_store

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.lab


def names(page: Page) -> list[str]:
    """Return the models that are shown, from top to bottom."""
    rows = page.locator(".grid-row").all()
    placed = [(int(row.get_attribute("aria-rowindex") or 0), row) for row in rows]
    return [
        row.locator(".name a").inner_text() for _, row in sorted(placed, key=lambda one: one[0])
    ]


def row_of(page: Page, name: str) -> list[str]:
    """Return the cells of a model's row."""
    row = page.locator(".grid-row", has=page.get_by_role("link", name=name, exact=True))
    return [cell.strip() for cell in row.locator(".cell").all_inner_texts()]


def test_models_are_listed_as_the_command_line_lists_them(site: Watched) -> None:
    page = site.open("/")
    site.expect(page).to_have_title("Models · blobstore")
    dense = row_of(page, DENSE)
    assert dense[1:6] == [DENSE, "54949e931783", "5.98 MB", "int4", "5.25M"]
    assert row_of(page, MIXTURE)[3:6] == ["5.3 MB", "nvfp4", "5.05M"]
    assert page.get_by_role("status").first.inner_text() == "7 models"


def test_a_broken_model_is_shown_as_such(site: Watched) -> None:
    page = site.open("/", filter="broken")
    assert names(page) == [BROKEN]
    cells = row_of(page, BROKEN)
    assert "broken" in cells
    assert "not valid JSON" in cells[1] or "manifest" in cells[1], cells
    site.expect(page.get_by_label(f"Compare {BROKEN}")).to_be_disabled()


def test_a_filter_is_in_the_address(site: Watched) -> None:
    page = site.open("/")
    page.keyboard.press("/")
    page.keyboard.type("moe NVFP4")
    assert names(page) == [MIXTURE]
    page.wait_for_url("**/?filter=moe+NVFP4")
    page.reload()
    site.settle()
    assert names(page) == [MIXTURE]
    page.get_by_label("Filter models").press("Escape")
    site.expect(page.locator("#count")).to_have_text("7 models")
    assert len(names(page)) == 7
    page.get_by_label("Filter models").fill("there is none")
    site.expect(page.get_by_text("No model matches this filter.")).to_be_visible()


def test_columns_sort_and_back_takes_it_back(site: Watched) -> None:
    page = site.open("/")
    newest_first = names(page)
    sized = page.get_by_role("columnheader", name="Size")
    sized.get_by_role("button").click()
    site.expect(sized).to_have_attribute("aria-sort", "descending")
    largest = names(page)
    assert largest[-1] == BROKEN
    sized.get_by_role("button").click()
    site.expect(sized).to_have_attribute("aria-sort", "ascending")
    smallest = names(page)
    assert (smallest[0], smallest[-2:]) == (HOSTILE, [LARGE, BROKEN])
    page.go_back()
    site.expect(sized).to_have_attribute("aria-sort", "descending")
    assert names(page) == largest
    page.go_back()
    site.expect(sized).not_to_have_attribute("aria-sort", "descending")
    assert names(page) == newest_first
    page.get_by_role("columnheader", name="Name").get_by_role("button").click()
    assert names(page) == sorted(names(page))


def test_the_keyboard_reaches_everything(site: Watched) -> None:
    page = site.open("/", sort="name")
    page.keyboard.press("Tab")
    site.expect(page.locator(":focus")).to_have_text("Skip to content")
    page.keyboard.press("Enter")
    site.expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("Tab")
    site.expect(page.locator("#filter")).to_be_focused()
    for _ in range(8):  # six sorting buttons, and the first row's box, which is broken's: disabled
        if page.locator(".grid-row a:focus").count():
            break
        page.keyboard.press("Tab")
    shown = names(page)
    site.expect(page.locator(":focus")).to_have_text(shown[0])
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    site.expect(page.locator(":focus")).to_have_text(shown[2])
    page.keyboard.press("End")
    site.expect(page.locator(":focus")).to_have_text(shown[-1])
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/model?name=*")
    assert page.get_by_role("heading", level=1).inner_text() == shown[1]


def test_chosen_models_are_compared(site: Watched) -> None:
    page = site.open("/")
    page.get_by_label(f"Compare {DENSE}", exact=True).check()
    page.get_by_label(f"Compare {MIXTURE}", exact=True).check()
    site.expect(page.get_by_text("2 models chosen")).to_be_visible()
    page.get_by_role("link", name="Compare", exact=True).last.click()
    page.wait_for_url("**/compare?model=pycode-5m%3Aint4&model=pycode-moe-5m%3Anvfp4")
    site.settle()


def test_the_theme_is_the_systems_until_it_is_switched(browser: Browser, origin: str) -> None:
    background = "getComputedStyle(document.documentElement).backgroundColor"
    with watched(browser, origin, theme="dark") as dark:
        page = dark.open("/")
        night = page.evaluate(background)
        switch = page.get_by_role("button", name="Dark theme")
        dark.expect(switch).to_have_attribute("aria-pressed", "true")
        switch.click()
        day = page.evaluate(background)
        assert day != night
        page = dark.open("/usage")  # another page knows it
        assert page.evaluate(background) == day
        page.get_by_role("button", name="Dark theme").click()
        assert page.evaluate(background) == night


def test_an_empty_store_names_the_next_command(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with (
        served(open_store(tmp_path / "empty"), tmp_path) as empty,
        watched(browser, empty) as found,
    ):
        for path in ("/", "/usage", "/compare"):
            page = found.open(path)
            found.expect(page.get_by_text("blobstore import FOLDER")).to_be_visible()
            assert found.violations() == []


def test_a_narrow_page_does_not_scroll_sideways(browser: Browser, origin: str) -> None:
    sites: list[tuple[str, dict[str, str | list[str]]]] = [
        ("/", {}),
        ("/model", {"name": DENSE}),
        ("/model", {"name": HOSTILE}),
        ("/model", {"name": LARGE}),
        ("/compare", {"model": [DENSE, MIXTURE]}),
        ("/usage", {}),
    ]
    with watched(browser, origin, size=NARROW) as found:
        for path, query in sites:
            page = found.open(path, **query)
            assert page.evaluate("document.documentElement.scrollWidth") <= NARROW[0], (path, query)
