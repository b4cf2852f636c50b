"""The page of the store: disk space, shared bytes, damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import PYCODE
from support.browser import Watched, watched
from support.page_store import BROKEN, DENSE, served

import blobstore
from blobstore.store.local.store import open_store

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.lab


def test_disk_space_is_that_of_du(site: Watched) -> None:
    page = site.open("/usage")
    rows = page.get_by_role("table", name="Disk space by model").locator("tbody tr")
    said = {row.split()[0]: row.split("\t")[1:] for row in rows.all_inner_texts()}
    assert said[DENSE] == ["5.98 MB", "1.32 MB", "4.66 MB"]
    assert said[BROKEN] == ["", "", ""]
    site.expect(page.locator("#shared [role=img] svg")).to_have_count(1)
    assert page.locator("#totals dd").first.inner_text().endswith(" MB")


def test_a_store_that_was_not_verified_names_the_command(site: Watched) -> None:
    page = site.open("/usage")
    site.expect(page.get_by_text("This store has not been verified yet.")).to_be_visible()
    site.expect(page.get_by_text("blobstore verify", exact=True)).to_be_visible()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_verify_found(
    browser: Browser, command: Callable[..., Any], tmp_path: Path, *, is_damaged: bool
) -> None:
    store = open_store(tmp_path / "store")
    blobstore.import_model(PYCODE, DENSE, store=store, quant="int4")
    if is_damaged:
        blob = max((store.root / "blobs").iterdir(), key=lambda path: path.stat().st_size)
        blob.chmod(0o644)
        blob.write_bytes(bytes(blob.stat().st_size))
    done = command("verify", "--store", store.root)
    assert done.returncode == (3 if is_damaged else 0), done
    with served(store, tmp_path) as origin, watched(browser, origin) as site:
        page = site.open("/usage")
        verdict = page.locator(".verdict").inner_text()
        assert verdict.startswith("1 fault 55" if is_damaged else "✓ All sound 55"), verdict
        if is_damaged:
            row = page.get_by_role("table", name="Damaged blobs").locator("tbody tr").inner_text()
            assert DENSE in row
            assert "model.embed_tokens.weight" in row
            site.expect(page.get_by_text("blobstore repair NAME")).to_be_visible()
        assert site.violations() == []
