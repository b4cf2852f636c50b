"""Texts of a store that try to be markup or scripts are shown as text, everywhere."""

from __future__ import annotations

import pytest
from support.browser import Watched
from support.page_store import DENSE, HOSTILE, HOSTILE_NAMES, HOSTILE_TEXTS

pytestmark = pytest.mark.lab
MARKUP = "img, script[src=x], svg[onload], [onerror], b, script:not([src])"


def escaped(name: str) -> str:
    """Return a name as the command line, and so a page, prints it."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in name)


def test_names_of_tensors_are_text(site: Watched) -> None:
    page = site.open("/model", name=HOSTILE)
    shown = page.locator(".tensors-grid .name a").all_inner_texts()
    assert sorted(shown) == sorted(map(escaped, HOSTILE_NAMES))
    site.unfold(page.locator("#treemap summary"))
    for name in HOSTILE_NAMES:
        page.locator(".tensors-grid").get_by_role("link", name=escaped(name), exact=True).click()
        site.settle()
        site.expect(page.locator("#tensor h3")).to_have_text(escaped(name))
        for summary in page.locator("#tensor summary").all():
            site.unfold(summary)
    site.point_at(page.locator("#treemap .role-mark path").first)
    site.expect(page.locator(".tip")).to_contain_text("F16, 1 tensor, 8.19 KB")
    site.expect(page.locator("main").locator(MARKUP)).to_have_count(0)


def test_texts_of_config_are_text(site: Watched) -> None:
    page = site.open("/model", name=HOSTILE)
    assert HOSTILE_TEXTS["architectures"][0] in page.locator(".lead").inner_text()
    assert HOSTILE_TEXTS["model_type"] in page.locator(".runs").inner_text()
    site.unfold(page.locator("#summary summary"))
    site.expect(page.get_by_text("<img src=x onerror=alert(11)>.json")).to_be_visible()
    site.expect(page.locator("main").locator(MARKUP)).to_have_count(0)


def test_differences_are_text(site: Watched) -> None:
    page = site.open("/compare", model=[DENSE, HOSTILE])
    for summary in page.locator("summary").all():
        if not summary.locator("xpath=..").get_attribute("open"):
            site.unfold(summary)
    site.expect(page.get_by_text(HOSTILE_NAMES[0], exact=True).first).to_be_visible()
    site.expect(page.locator("main").locator(MARKUP)).to_have_count(0)


@pytest.mark.parametrize("path", ["/", "/model", "/compare", "/usage"])
@pytest.mark.parametrize("text", ["<img src=x onerror=alert(1)>", '"><script>alert(2)</script>'])
def test_texts_of_addresses_are_text(site: Watched, path: str, text: str) -> None:
    names = ("name", "model", "tensor", "filter", "search", "sort", "type")
    page = site.open(path, **dict.fromkeys(names, text))
    site.expect(page.locator("main").locator(MARKUP)).to_have_count(0)
    site.faults = [fault for fault in site.faults if "status of 4" not in fault]
