"""One store and one server for all tests of the pages, and a browser for each file of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from pages.browser import Watched, chromium, watched
from pages.page_store import filled_store, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, for a file: its client's event loop must end before other tests' loops."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("pages")
    with served(filled_store(folder)) as found:
        yield found


@pytest.fixture
def site(browser: Browser, origin: str) -> Iterator[Watched]:
    """A page of 1280 pixels, light."""
    with watched(browser, origin) as found:
        yield found
