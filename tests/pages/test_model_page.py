"""The page of a model: summary, plots, the table of tensors, a chosen tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.browser import NARROW, Watched, watched
from support.checkpoints import raw_safetensors, write_checkpoint
from support.page_store import BROKEN, DENSE, LARGE, MIXTURE, TENSORS, served

import blobstore
from blobstore.store.local.store import open_store

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.lab
GATE = "model.layers.0.mlp.gate_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def tensors(page: Page) -> list[str]:
    """Return the tensors that are drawn, from top to bottom."""
    rows = page.locator(".tensors-grid .grid-row").all()
    placed = [(int(row.get_attribute("aria-rowindex") or 0), row) for row in rows]
    return [
        row.locator(".name a").inner_text() for _, row in sorted(placed, key=lambda one: one[0])
    ]


def fact(page: Page, name: str) -> str:
    """Return the value of a fact in the summary."""
    return page.locator("#summary dt", has_text=name).locator("xpath=../dd").inner_text()


def test_the_summary_is_that_of_show(site: Watched) -> None:
    page = site.open("/model", name=DENSE)
    site.expect(page).to_have_title(f"{DENSE} · blobstore")
    site.expect(
        page.get_by_text("Qwen3ForCausalLM · 5.25M parameters · int4 · 5.98 MB")
    ).to_be_visible()
    assert fact(page, "Context length") == "1,024"
    assert fact(page, "ID").startswith("sha256:54949e93178345bc")
    assert fact(page, "Capabilities").split() == ["completion"]
    site.expect(page.get_by_text("runs in mlx-lm")).to_be_visible()
    weights = page.locator("#weights tbody tr").all_inner_texts()
    assert weights == ["int8\t2.1M\t2.23 MB\t39.5%", "BF16\t1.05M\t2.1 MB\t37.3%", "int4\t2.1M\t1.31 MB\t23.2%"]  # fmt: skip # noqa: E501


def test_the_treemap_has_a_description_and_a_table(site: Watched) -> None:
    page = site.open("/model", name=DENSE)
    picture = page.locator("#treemap [role=img]")
    assert "int8/64 39.5%" in (picture.get_attribute("aria-label") or "")
    site.expect(picture.locator("svg")).to_have_count(1)
    site.unfold(page.locator("#treemap summary"))
    site.expect(page.locator("#treemap tbody tr").first).to_be_visible()
    rows = page.locator("#treemap tbody tr").all_inner_texts()
    assert rows[0] == "model\tembed_tokens\tBF16\t1\t2.1 MB\t37.2%"


def test_a_click_in_the_treemap_lists_its_tensors(site: Watched) -> None:
    page = site.open("/model", name=DENSE)
    found = page.locator("#found")
    site.expect(found).to_have_text("47 tensors, 5.64 MB")
    page.locator("#treemap .mark-rect path").nth(3).click()
    site.expect(found).to_have_text("1 of 47 tensors, 512 B")
    assert tensors(page) == ["model.layers.0.input_layernorm.weight"]
    page.wait_for_url("**place=model.layers.0.input_layernorm")
    site.expect(page.locator("#place")).to_contain_text("in model.layers.0.input_layernorm")
    shared = page.url
    page.get_by_role("button", name="Show all modules").click()
    site.expect(found).to_have_text("47 tensors, 5.64 MB")
    site.expect(page.locator("#place")).to_be_hidden()
    site.expect(page.get_by_label("Search tensors")).to_be_focused()
    page.goto(shared)
    site.settle()
    site.expect(found).to_have_text("1 of 47 tensors, 512 B")


def test_the_keyboard_lists_the_tensors_of_a_module(site: Watched) -> None:
    page = site.open("/model", name=DENSE)
    summary = page.locator("#treemap summary")
    summary.press("Enter")
    module = page.get_by_role("link", name="model.layers.3", exact=True).first
    module.press("Enter")
    site.expect(page.locator("#found")).to_have_text("11 of 47 tensors, 607 KB")
    page.wait_for_url("**place=model.layers.3")
    page.go_back()
    site.expect(page.locator("#found")).to_have_text("47 tensors, 5.64 MB")


def test_experts_drawn_together_are_listed_together(site: Watched) -> None:
    place = "model.layers.7.mlp.experts.*.gate_proj"
    page = site.open("/model", name=LARGE, place=place)
    site.expect(page.locator("#found")).to_have_text("128 of 50,000 tensors, 9.22 KB")
    assert tensors(page)[0] == "model.layers.7.mlp.experts.0.gate_proj.weight"


def test_the_mark_under_the_pointer_is_named_in_two_lines(site: Watched) -> None:
    page = site.open("/model", name=DENSE)
    site.point_at(page.locator("#treemap .mark-rect path").first)
    site.expect(page.locator(".tip")).to_have_text("lm_head\nint8/64, 1 tensor, 1.11 MB (19.7%)")


def test_tensors_are_searched_sorted_and_of_a_type(site: Watched) -> None:
    page = site.open("/model", name=DENSE)
    page.keyboard.press("/")
    page.keyboard.type("0.mlp")
    assert len(tensors(page)) == 3
    page.wait_for_url("**search=0.mlp")
    page.get_by_role("button", name="int4 16").click()
    assert tensors(page) == [GATE, "model.layers.0.mlp.up_proj.weight"]
    site.expect(page.get_by_text("2 of 47 tensors, 246 KB")).to_be_visible()
    page.go_back()
    site.expect(page.get_by_text("3 of 47 tensors, ")).to_be_visible()
    assert len(tensors(page)) == 3
    sized = page.get_by_role("grid").get_by_role("columnheader", name="Size")
    sized.get_by_role("button").click()
    assert (tensors(page)[0], sized.get_attribute("aria-sort")) == (DOWN, "descending")
    shared = page.url
    page.goto("about:blank")
    page.goto(shared)
    site.settle()
    assert tensors(page)[0] == DOWN
    assert len(tensors(page)) == 3


def test_a_chosen_tensor_shows_its_distribution(site: Watched) -> None:
    page = site.open("/model", name=DENSE)
    page.get_by_role("link", name=GATE).click()
    site.settle()
    panel = page.get_by_role("region", name="Chosen tensor")
    site.expect(panel.get_by_role("heading")).to_have_text(GATE)
    site.expect(panel.get_by_role("img").first).to_be_visible()
    site.unfold(panel.locator("summary").first)
    site.expect(panel.locator("tbody tr").nth(15)).to_be_visible()  # a row for each code of int4
    page.wait_for_url(f"**tensor={GATE}")
    page.go_back()
    site.expect(panel).to_be_hidden()
    page.go_forward()
    site.expect(panel).to_be_visible()
    site.settle()
    panel.press("Escape")
    site.expect(panel).to_be_hidden()
    site.expect(page.locator(":focus")).to_have_text(GATE)


def test_a_tensor_without_a_histogram_says_why(browser: Browser, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    source = write_checkpoint(tmp_path / "source")
    header = {"odd": {"dtype": "C64", "shape": [2], "data_offsets": [0, 16]}}
    (source / "model.safetensors").write_bytes(raw_safetensors(header, bytes(16)))
    blobstore.import_model(source, "m", store=store)
    with served(store, tmp_path) as origin, watched(browser, origin) as found:
        page = found.open("/model", name="m", tensor="odd")
        said = page.get_by_text("Complex values have no histogram.")
        found.expect(said).to_be_visible()
        assert page.get_by_role("alert").count() == 0


def test_the_keyboard_chooses_a_tensor(site: Watched) -> None:
    page = site.open("/model", name=MIXTURE, search="experts")
    site.focus(page.get_by_label("Search tensors"))
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.locator(".tensors-grid a:focus").count():
            break
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    site.settle()
    panel = page.get_by_role("region", name="Chosen tensor")
    site.expect(panel.get_by_role("heading")).to_have_text(tensors(page)[1])
    site.expect(page.locator("#tensor")).to_be_focused()


def test_fifty_thousand_tensors_are_a_few_rows(site: Watched) -> None:
    page = site.open("/model", name=LARGE)
    site.expect(page.locator("#found")).to_contain_text(f"{TENSORS:,} tensors, ")
    grid = page.get_by_role("grid", name="Tensors")
    assert grid.get_attribute("aria-rowcount") == str(TENSORS + 1)
    assert page.locator(".tensors-grid .grid-row").count() < 80
    site.focus(page.locator(".tensors-grid a").first)
    page.keyboard.press("End")
    last = page.locator(f".tensors-grid [aria-rowindex='{TENSORS + 1}']")
    assert last.get_by_role("link").evaluate("link => link === document.activeElement")
    page.keyboard.press("PageUp")
    assert page.locator(".tensors-grid .grid-row").count() < 80
    page.get_by_role("columnheader", name="Name").get_by_role("button").click()
    assert tensors(page)[0].startswith("model.layers.0.")
    page.get_by_label("Search tensors").fill("layers.2 experts.127 up_proj")
    site.expect(page.locator("#found")).to_contain_text(f" of {TENSORS:,} tensors")
    found = tensors(page)
    assert found[0] == "model.layers.2.mlp.experts.127.up_proj.weight"
    assert found[1] == "model.layers.20.mlp.experts.127.up_proj.weight"


def test_a_theme_is_that_of_plots_too(site: Watched) -> None:
    page = site.open("/model", name=DENSE)
    plot = page.locator("#treemap svg")
    site.expect(plot).to_have_css("background-color", "rgb(255, 255, 255)")
    page.get_by_role("button", name="Dark theme").click()
    site.expect(plot).to_have_css("background-color", "rgb(21, 24, 29)")


def test_without_quality_the_command_is_named(site: Watched) -> None:
    page = site.open("/model", name=MIXTURE)
    command = f"blobstore quality {MIXTURE} --against SOURCE"
    site.expect(page.get_by_text(command, exact=True)).to_be_visible()


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [("absent:model", 404, "not found"), (BROKEN, 409, "manifest")],
)
def test_what_can_t_be_shown_says_why(
    browser: Browser, origin: str, name: str, status: int, says: str
) -> None:
    with watched(browser, origin) as found:
        page = found.open("/model", name=name)
        found.expect(page.get_by_role("alert")).to_be_visible()
        assert says in page.get_by_role("alert").inner_text()
        found.expect(page.locator("#parts")).to_be_hidden()
        assert found.violations() == []
        failed = [fault for fault in found.faults if f"status of {status}" in fault]
        assert failed == found.faults  # a browser says of each answer that is not 2xx
        found.faults.clear()


def test_the_server_may_go_away(browser: Browser, origin: str) -> None:
    with watched(browser, origin, size=NARROW) as found:
        page = found.open("/model", name=DENSE)
        page.context.set_offline(True)
        page.get_by_role("link", name=GATE).click()
        assert (
            page.get_by_role("alert").inner_text().startswith("This could not be shown: the server")
        )
        page.context.set_offline(False)
        page.get_by_role("button", name="Try again").click()
        found.settle()
        found.expect(page.locator("#tensor").get_by_role("img").first).to_be_visible()
        found.faults.clear()  # the browser says that it was offline


def test_tensors_that_did_not_come_are_asked_for_again(browser: Browser, origin: str) -> None:
    with watched(browser, origin) as found:
        found.page.route("**/api/tensors?*", lambda route: route.abort())
        page = found.open("/model", name=DENSE)
        again = page.locator("#tensors").get_by_role("button", name="Try again")
        found.expect(again).to_be_visible()
        page.unroute("**/api/tensors?*")
        again.click()
        found.settle()
        assert tensors(page)
        found.faults.clear()  # the browser says of the request that it failed
