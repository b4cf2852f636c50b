"""How quick the pages are in Chromium: ``python tests/bench/pages.py``.

Prints a table for a model of 50,000 tensors and a list of 1,000 models, served on loopback. *Shown*
is the time from an event (``Event.timeStamp``) to the end of the frame that follows it, in which
what it changed is painted; *opened* that from the start of a navigation to the first row's frame.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import machine
from support.browser import Watched, chromium, watched
from support.large_models import large_model, listed_models
from support.page_store import served
from tables import show, table

from blobstore.store.local.store import open_store

if TYPE_CHECKING:
    from playwright.sync_api import Page

TENSORS, MODELS = 50_000, 1_000
LARGE = "large:int4"
ROUNDS = 5
TEXTS = ("layers.3 up", "experts.77", "int4", "zzz")
_NOTE = """
  window.shown = [];
  const note = (start) => requestAnimationFrame(() => {
    const after = new MessageChannel();
    after.port1.onmessage = () => window.shown.push(performance.now() - start);
    after.port2.postMessage(null);
  });
  for (const type of ["input", "click"]) {
    addEventListener(type, (event) => note(event.timeStamp), {capture: true});
  }
"""
_OPENED = """
  const wait = () => document.querySelector(".grid-row")
    ? requestAnimationFrame(() => { window.opened = performance.now(); })
    : requestAnimationFrame(wait);
  wait();
"""


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{machine(folder, ('playwright', 'starlette', 'uvicorn'))}\n", flush=True)
        store = open_store(folder / "store")
        large_model(store, LARGE, TENSORS, together=100)
        listed_models(store, MODELS - 1)
        with served(store, folder) as origin, chromium() as browser:
            print(f"Chromium {browser.version}\n")
            table("what", "times", "median ms", "95 % ms", "largest ms")
            with watched(browser, origin) as site:
                site.page.add_init_script(_NOTE)
                site.page.add_init_script(_OPENED)
                model = f"model of {TENSORS:,} tensors"
                row(f"{model}: opened", opened(site, "/model", name=LARGE))
                row(f"{model}: a key stroke shown", keys(site.page, "#search"))
                row(f"{model}: sorted", sorts(site.page))
                row(f"list of {MODELS:,} models: opened", opened(site, "/"))
                row(f"list of {MODELS:,} models: a key stroke shown", keys(site.page, "#filter"))
                row(f"list of {MODELS:,} models: sorted", sorts(site.page))


def opened(site: Watched, path: str, **query: str) -> list[float]:
    """Return the times from a navigation to the first row; the first one is not counted."""

    def once() -> float:
        page = site.open(path, **query)
        page.wait_for_selector(".grid-row")
        return float(page.evaluate("window.opened"))

    return [once() for _ in range(ROUNDS + 1)][1:]


def keys(page: Page, box: str) -> list[float]:
    """Return the time of each key stroke in a search box."""

    def typed(text: str) -> Callable[[], None]:
        def strokes() -> None:
            page.fill(box, "")
            page.evaluate("window.shown.length = 0")
            for letter in text:
                page.keyboard.press("Space" if letter == " " else letter)
                page.wait_for_timeout(30)

        return strokes

    return [time for text in TEXTS for _ in range(ROUNDS) for time in noted(page, typed(text))]


def sorts(page: Page) -> list[float]:
    """Return the time of each sort, by every column in both directions."""
    page.reload()
    page.wait_for_selector(".grid-row")
    buttons = page.locator(".grid-head button").all()

    def clicks() -> None:
        for button in buttons * 2:
            button.click()
            page.wait_for_timeout(100)

    return noted(page, clicks)


def noted(page: Page, do: Callable[[], None]) -> list[float]:
    """Return the times of the events that ``do`` causes."""
    page.evaluate("window.shown.length = 0")
    do()
    page.wait_for_timeout(200)
    return [float(time) for time in page.evaluate("window.shown")]


def row(what: str, times: Sequence[float]) -> None:
    """Print a row."""
    late = statistics.quantiles(times, n=20, method="inclusive")[-1]
    figures = (statistics.median(times), late, max(times))
    show((what, str(len(times)), *(f"{one:.0f}" for one in figures)))


if __name__ == "__main__":
    main()
