"""The page that compares models: a chooser, what differs, error against size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.browser import Watched, watched
from support.page_store import BETTER, BROKEN, DENSE, MIXTURE, WIDER

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.lab


def test_what_differs_between_two(site: Watched) -> None:
    page = site.open("/compare", model=[DENSE, WIDER])
    site.expect(page).to_have_title(f"Compare {DENSE}, {WIDER} · blobstore")
    facts = dict(
        zip(
            page.locator("#comparison dt").all_inner_texts(),
            page.locator("#comparison dd").all_inner_texts(),
            strict=True,
        )
    )
    assert facts["A"] == f"{DENSE} 5.98 MB"
    assert (facts["Shared"], facts["Equal tensors"], facts["Changed"]) == ("4.66 MB", "31", "16")
    changed = page.get_by_role("table", name="Changed tensors").locator("tbody tr")
    site.expect(changed).to_have_count(16)
    assert changed.first.inner_text().split()[1:3] == ["int4/32", "int8/64"]


def test_error_against_size_of_several(site: Watched) -> None:
    page = site.open("/compare", model=[DENSE, BETTER, WIDER])
    picture = page.locator("#comparison [role=img]")
    assert BETTER in (picture.get_attribute("aria-label") or "")
    rows = page.get_by_role("table", name="Error against size").locator("tbody tr")
    said = {row.split()[0]: row.split("\t")[3:] for row in rows.all_inner_texts()}
    assert said[DENSE] == ["4.99%", ""]
    assert said[BETTER] == ["4.23%", "Pareto front"]
    assert said[WIDER][1] == "Pareto front"


def test_what_is_not_measured_names_its_command(site: Watched) -> None:
    page = site.open("/compare", model=[DENSE, MIXTURE])
    site.expect(page.get_by_text(f"blobstore quality {MIXTURE} --against SOURCE")).to_be_visible()


def test_a_model_that_is_gone_leaves_the_others(browser: Browser, origin: str) -> None:
    with watched(browser, origin) as found:
        page = found.open("/compare", model=[DENSE, BETTER, "gone:int4"])
        rows = page.get_by_role("table", name="Error against size").locator("tbody tr")
        said = {row.split()[0]: row.split("\t")[3] for row in rows.all_inner_texts()}
        assert said == {DENSE: "4.99%", BETTER: "4.23%", "gone:int4": "not found"}
        assert page.locator("#comparison [role=img]").count() == 1
        assert all("status of 404" in fault for fault in found.faults)
        found.faults.clear()


def test_models_are_chosen_by_the_keyboard_and_back_takes_it_back(site: Watched) -> None:
    page = site.open("/compare")
    box = page.get_by_label("Add a model")
    names = page.locator("#addable option").evaluate_all("all => all.map(one => one.value)")
    assert DENSE in names
    assert BROKEN not in names
    box.fill("absent")
    box.press("Enter")
    assert box.evaluate("one => one.validationMessage") == "No other model has this name."
    box.fill(DENSE)
    box.press("Enter")
    site.settle()
    assert box.evaluate("one => one === document.activeElement")
    page.get_by_role("button", name="Add all types of pycode-5m").press("Enter")
    site.settle()
    picked = page.get_by_role("list", name="Chosen models").get_by_role("link")
    assert sorted(picked.all_inner_texts()) == sorted([DENSE, BETTER, WIDER])
    page.get_by_role("button", name=f"Remove {BETTER}").click()
    site.settle()
    assert sorted(picked.all_inner_texts()) == sorted([DENSE, WIDER])
    page.go_back()
    site.settle()
    assert sorted(picked.all_inner_texts()) == sorted([DENSE, BETTER, WIDER])
