"""axe-core finds nothing serious or critical on any page, wide or narrow, light or dark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.browser import NARROW, WIDE, Theme, watched
from support.page_store import BETTER, DENSE, HOSTILE, LARGE, MIXTURE, WIDER

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.lab
GATE = "model.layers.0.mlp.gate_proj.weight"
PAGES: dict[str, tuple[str, dict[str, str | list[str]]]] = {
    "models": ("/", {}),
    "nothing found": ("/", {"filter": "there is none"}),
    "dense": ("/model", {"name": DENSE}),
    "a tensor": ("/model", {"name": DENSE, "tensor": GATE, "search": "gate"}),
    "mixture": ("/model", {"name": MIXTURE}),
    "large": ("/model", {"name": LARGE}),
    "hostile": ("/model", {"name": HOSTILE}),
    "two": ("/compare", {"model": [DENSE, MIXTURE]}),
    "several": ("/compare", {"model": [DENSE, BETTER, WIDER]}),
    "chooser": ("/compare", {}),
    "usage": ("/usage", {}),
}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_serious(
    browser: Browser, origin: str, size: tuple[int, int], theme: Theme
) -> None:
    with watched(browser, origin, size=size, theme=theme) as site:
        found = {}
        for name, (path, query) in PAGES.items():
            page = site.open(path, **query)
            for summary in page.locator("summary").all():
                if summary.is_visible() and not summary.evaluate("one => one.parentElement.open"):
                    site.unfold(summary)
            found[name] = site.violations()
        assert {name: faults for name, faults in found.items() if faults} == {}
