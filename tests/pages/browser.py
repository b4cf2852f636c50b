"""Debian's Chromium, and pages of which everything that should not happen is noted.

A page fails its test at the end if its console has an error or a warning, a
script throws, the Content-Security-Policy is violated, or a request goes to another origin.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlencode

from support.registries import cannot_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request

AXE = Path(os.environ.get("AXE", "/opt/axe/node_modules/axe-core/axe.min.js"))
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WIDE, NARROW = (1280, 800), (390, 844)
_VIOLATIONS = """
addEventListener("securitypolicyviolation", (event) =>
  console.error(`CSP: ${event.effectiveDirective} ${event.blockedURI} ${event.sourceFile}`));
"""
_TWO_FRAMES = """
() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))
"""
PATIENCE_MS = 120_000
_AXE_OPTIONS = {"resultTypes": ["violations"]}
Theme = Literal["light", "dark"]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Debian's Chromium without a window; `cannot_run` where it is missing."""
    program = shutil.which("chromium")
    if program is None:
        cannot_run("chromium is not installed (.ci/browser)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=list(FLAGS), timeout=PATIENCE_MS
        )
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page of a server, and what went wrong on it."""

    page: Page
    origin: str
    faults: list[str] = field(default_factory=list)

    def open(self, path: str, **query: str | list[str]) -> Page:
        """Go to a page of the server, and wait until it has been drawn."""
        address = f"{path}?{urlencode(query, doseq=True)}" if query else path
        self.page.goto(self.origin + address)
        self.settle()
        return self.page

    @property
    def expect(self) -> Any:
        """Playwright's assertions, which wait until they are true."""
        from playwright.sync_api import expect

        expect.set_options(timeout=PATIENCE_MS)
        return expect

    def settle(self) -> None:
        self.expect(self.page.locator("[aria-busy]")).to_have_count(0)

    def unfold(self, summary: Locator) -> None:
        """Open what is folded below a summary, and wait for the content that a script makes."""
        summary.click()
        self.expect(summary.locator("xpath=following-sibling::*").first).to_be_attached()

    def focus(self, element: Locator) -> None:
        """Give an element the focus; Chromium 156 once did not answer, so it is asked again."""
        from playwright.sync_api import TimeoutError as TooLateError

        for patience_ms in (PATIENCE_MS / 12, PATIENCE_MS / 6):
            with suppress(TooLateError):
                return element.focus(timeout=patience_ms)
        return element.focus()

    def point_at(self, mark: Locator) -> None:
        """Move the pointer to a mark of a plot, whose tip is shown then.

        Scrolling hides tips, and a page hears of it with its next frame, which may be after the
        pointer came. So the page is scrolled before, and has a frame to hear of it.
        """
        mark.scroll_into_view_if_needed()
        self.page.evaluate(_TWO_FRAMES)
        mark.hover()

    def violations(self) -> list[str]:
        if not AXE.exists():
            cannot_run(f"axe-core is not installed in {AXE} (.ci/browser /opt/axe)")
        self.page.evaluate(AXE.read_text())
        found: Mapping[str, Any] = self.page.evaluate("o => axe.run(document, o)", _AXE_OPTIONS)
        return [
            f"{rule['id']} ({rule['impact']}): {node['html'][:200]} {node['failureSummary']}"
            for rule in found["violations"]
            if rule["impact"] in {"serious", "critical"}
            for node in rule["nodes"]
        ]

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning", "assert"}:
            self.faults.append(f"console {message.type}: {message.text} {message.location}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith((f"{self.origin}/", "data:")):
            self.faults.append(f"request: {request.url}")


@contextmanager
def watched(
    browser: Browser, origin: str, *, size: tuple[int, int] = WIDE, theme: Theme = "light"
) -> Iterator[Watched]:
    """Open a page in a profile of its own, and check it at the end."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=theme, reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(_VIOLATIONS)
    found = Watched(context.new_page(), origin)
    found.page.on("console", found._console)
    for event in ("pageerror", "dialog"):
        found.page.on(event, lambda said: found.faults.append(str(said)))
    context.on("request", found._request)
    try:
        yield found
        assert not found.faults, "\n".join(found.faults)
    finally:
        context.close()
