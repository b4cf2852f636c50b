"""The pages of ``blobstore serve`` in Chromium: what they show, keyboard, addresses, faults."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pages import page_store
from pages.browser import NARROW, WIDE, Theme, Watched, watched
from pages.page_store import BETTER, BROKEN, DENSE, HOSTILE, LARGE, MIXTURE, TENSORS, WIDER
from support import PYCODE
from support.commands import damage_largest_blob

import blobstore
from blobstore.cli.main import run
from blobstore.cli.output import printable, shape
from blobstore.store.local.store import open_store
from blobstore.views.quantities import count, size

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.lab

GATE = "model.layers.0.mlp.gate_proj.weight"


def names(page: Page, grid: str = ".grid-row") -> list[str]:
    """Return the models or tensors that are drawn, from top to bottom."""
    rows = page.locator(grid).all()
    rows.sort(key=lambda row: int(row.get_attribute("aria-rowindex") or 0))
    return [row.locator(".name a").inner_text() for row in rows]


def tensors(page: Page) -> list[str]:
    return names(page, ".tensors-grid .grid-row")


def row_of(page: Page, name: str) -> list[str]:
    row = page.locator(".grid-row", has=page.get_by_role("link", name=name, exact=True))
    return [cell.strip() for cell in row.locator(".cell").all_inner_texts()]


def test_models_are_listed_as_the_command_line_lists_them(site: Watched) -> None:
    page = site.open("/")
    site.expect(page).to_have_title("Models · blobstore")
    dense = row_of(page, DENSE)
    assert dense[1:7] == [DENSE, "54949e931783", "5.98 MB", "int4", "8.60", "5.25M"]
    assert row_of(page, MIXTURE)[3:7] == ["5.3 MB", "nvfp4", "7.83", "5.05M"]
    assert page.get_by_role("status").first.inner_text() == "7 models"
    cells = row_of(page, BROKEN)
    assert "broken" in cells
    assert "manifest" in cells[1] or "JSON" in cells[1]
    site.expect(page.get_by_label(f"Compare {BROKEN}")).to_be_disabled()


def test_a_filter_and_an_order_are_in_the_address(site: Watched) -> None:
    page = site.open("/")
    page.keyboard.press("/")
    page.keyboard.type("moe NVFP4")
    assert names(page) == [MIXTURE]
    page.wait_for_url("**/?filter=moe+NVFP4")
    page.reload()
    site.settle()
    assert names(page) == [MIXTURE]
    page.get_by_label(f"Compare {MIXTURE}").check()
    page.reload()
    site.settle()
    site.expect(page.locator("#chosen")).to_contain_text("1 model chosen")
    page.get_by_label("Filter models").press("Escape")
    site.expect(page.locator("#count")).to_have_text("7 models")
    assert len(names(page)) == 7
    sized = page.get_by_role("columnheader", name="Size")
    sized.get_by_role("button").click()
    site.expect(sized).to_have_attribute("aria-sort", "descending")
    assert names(page)[-1] == BROKEN


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


def fact(page: Page, name: str) -> str:
    return page.locator("#summary dt", has_text=name).locator("xpath=../dd").inner_text()


def test_the_summary_is_that_of_show(site: Watched) -> None:
    page = site.open("/model", name=DENSE)
    site.expect(page).to_have_title(f"{DENSE} · blobstore")
    lead = page.get_by_text("Qwen3ForCausalLM · 5.25M parameters · int4 · 5.98 MB")
    site.expect(lead).to_be_visible()
    assert fact(page, "Context length") == "1,024"
    assert fact(page, "ID").startswith("sha256:54949e93178345bc")
    site.expect(page.get_by_text("runs in mlx-lm")).to_be_visible()
    weights = " ".join(page.locator("#weights tbody").inner_text().split())
    shown = "int8 2.1M 2.23 MB 39.5% BF16 1.05M 2.1 MB 37.3% int4 2.1M 1.31 MB 23.2%"
    assert weights == shown


def test_a_click_in_the_treemap_lists_its_tensors(site: Watched) -> None:
    page = site.open("/model", name=DENSE)
    picture = page.locator("#treemap [role=img]")
    assert "int8/64 39.5%" in (picture.get_attribute("aria-label") or "")
    site.point_at(page.locator("#treemap .mark-rect path").first)
    site.expect(page.locator(".tip")).to_have_text("lm_head\nint8/64, 1 tensor, 1.11 MB (19.7%)")
    found = page.locator("#found")
    site.expect(found).to_have_text("47 tensors, 5.64 MB")
    tiles = page.locator("#treemap .mark-rect path")
    tiles.nth(3).click()
    for _ in range(2):  # the second time as the address alone says it
        site.expect(found).to_have_text("11 of 47 tensors, 607 KB")
        site.expect(tiles).to_have_count(11)
        site.expect(page.locator("#place")).to_have_text("in model.layers.0✕")
        marked = page.locator(".grid-row[aria-current=true]")
        site.expect(marked).to_contain_text("model.layers.0.input_layernorm.weight")
        site.expect(marked).to_be_in_viewport()
        page.wait_for_url("**place=model.layers.0.input_layernorm*")
        page.reload()
        site.settle()
    page.get_by_role("button", name="Show all modules").click()
    site.expect(found).to_have_text("47 tensors, 5.64 MB")
    site.expect(tiles).to_have_count(47)
    page.locator("#treemap summary").press("Enter")
    page.get_by_role("link", name="model.layers.3", exact=True).first.press("Enter")
    site.expect(found).to_have_text("11 of 47 tensors, 607 KB")


def test_the_modules_are_a_tree(site: Watched) -> None:
    page = site.open("/model", name=DENSE)
    site.unfold(page.locator("#tree summary"))
    page.wait_for_url("**tree=open*")
    page.reload()
    site.settle()
    rows = page.get_by_role("table", name="Modules").locator("tbody tr")
    site.expect(rows.nth(4)).to_have_text("0-3 (4 alike)int4/32int8/64BF163.15M2.43 MB")
    site.expect(rows.first).to_be_in_viewport()


def test_a_link_opens_where_its_sender_stood(site: Watched) -> None:
    page = site.open("/model", name=DENSE, row=GATE, at="4:100")
    grid = page.get_by_role("grid", name="Tensors")
    site.expect(grid.get_by_role("link", name=GATE)).to_be_in_viewport()
    assert page.evaluate("scrollY") > 0
    grid.evaluate("grid => grid.scrollTo(0, 320)")
    page.wait_for_url("**row=model.layers.0.self_attn.q_norm.weight*")


def test_tensors_are_searched_and_one_is_chosen(site: Watched) -> None:
    page = site.open("/model", name=DENSE)
    page.keyboard.press("/")
    page.keyboard.type("0.mlp")
    assert len(tensors(page)) == 3
    page.wait_for_url("**search=0.mlp*")
    page.get_by_role("button", name="int4 16").click()
    assert tensors(page) == [GATE, "model.layers.0.mlp.up_proj.weight"]
    page.go_back()
    site.expect(page.get_by_text("3 of 47 tensors, ")).to_be_visible()
    page.context.set_offline(True)
    page.get_by_role("link", name=GATE).click()
    assert page.get_by_role("alert").inner_text().startswith("This could not be shown: the server")
    page.context.set_offline(False)
    page.get_by_role("button", name="Try again").click()
    site.settle()
    panel = page.get_by_role("region", name="Chosen tensor")
    site.expect(panel.get_by_role("heading")).to_have_text(GATE)
    site.expect(panel.get_by_role("img").first).to_be_visible()
    site.unfold(panel.locator("summary").first)
    site.expect(panel.locator("tbody tr").nth(15)).to_be_visible()  # a row for each code of int4
    page.wait_for_url(f"**tensor={GATE}*")
    panel.press("Escape")
    site.expect(panel).to_be_hidden()
    site.expect(page.locator(":focus")).to_have_text(GATE)
    site.faults.clear()  # the browser says that it was offline


def test_very_many_tensors_are_a_few_rows(site: Watched) -> None:
    page = site.open("/model", name=LARGE)
    site.expect(page.locator("#found")).to_contain_text(f"{TENSORS:,} tensors, ")
    grid = page.get_by_role("grid", name="Tensors")
    assert grid.get_attribute("aria-rowcount") == str(TENSORS + 1)
    assert page.locator(".tensors-grid .grid-row").count() < 80
    site.focus(page.locator(".tensors-grid a").first)
    page.keyboard.press("End")
    last = page.locator(f".tensors-grid [aria-rowindex='{TENSORS + 1}']")
    assert last.get_by_role("link").evaluate("link => link === document.activeElement")
    page.get_by_label("Search tensors").fill("layers.1 experts.127 up_proj")
    site.expect(page.locator("#found")).to_contain_text(f" of {TENSORS:,} tensors")
    found = tensors(page)
    assert found[0] == "model.layers.1.mlp.experts.127.up_proj.weight"
    assert found[1] == "model.layers.10.mlp.experts.127.up_proj.weight"


def test_a_model_says_how_it_is_used(site: Watched) -> None:
    page = site.open("/model", name=DENSE)
    folder = DENSE.replace(":", "-")
    lines = page.locator("#uses .command code").all_inner_texts()
    assert lines == [
        f"blobstore run {DENSE}",
        f'import blobstore; model = blobstore.open_model("{DENSE}")',
        f"blobstore export {DENSE} {folder} --format mlx && mlx_lm.chat --model {folder}",
        f"ollama run {DENSE}",
        f"blobstore pull {site.origin[7:]}/library/{DENSE} --as {DENSE} --insecure",
    ]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#uses button").first.click()
    site.expect(page.locator("#uses [role=status]").first).to_have_text("The command was copied")
    assert page.evaluate("navigator.clipboard.readText()") == lines[0]


def test_a_wrong_address_and_a_server_without_a_plan_have_a_page(site: Watched) -> None:
    page = site.open("/models")
    page.get_by_role("button", name="Dark theme").click()
    assert site.violations() == []
    page.get_by_role("link", name="All models").click()
    site.expect(page.locator("#count")).to_have_text("7 models")
    site.faults.clear()  # the browser says that the answer is not 2xx
    page = site.open("/plan")
    site.expect(page.get_by_text("blobstore serve --plan SOURCE")).to_be_visible()


def test_a_model_that_can_t_be_shown_says_why(browser: Browser, origin: str) -> None:
    with watched(browser, origin) as found:
        for name, says in (("absent:model", "not found"), (BROKEN, "manifest")):
            page = found.open("/model", name=name)
            found.expect(page.get_by_role("alert")).to_be_visible()
            assert says in page.get_by_role("alert").inner_text()
            found.expect(page.locator("#parts")).to_be_hidden()
        found.faults.clear()  # a browser says of each answer that it is not 2xx


def test_what_differs_between_two(site: Watched) -> None:
    page = site.open("/compare", model=[DENSE, WIDER])
    site.expect(page).to_have_title(f"Compare {DENSE}, {WIDER} · blobstore")
    words, values = (page.locator(f"#comparison {of}").all_inner_texts() for of in ("dt", "dd"))
    facts = dict(zip(words, values, strict=True))
    assert facts["A"] == f"{DENSE} 5.98 MB"
    assert (facts["Shared"], facts["Equal tensors"], facts["Changed"]) == ("4.66 MB", "31", "16")
    changed = page.get_by_role("table", name="Changed tensors").locator("tbody tr")
    site.expect(changed).to_have_count(16)
    assert changed.first.inner_text().split()[1:3] == ["int4/32", "int8/64"]
    page = site.open("/compare", model=[DENSE, BETTER, WIDER])
    rows = page.get_by_role("table", name="Error against size").locator("tbody tr")
    said = {row.split()[0]: row.split("\t")[3::2] for row in rows.all_inner_texts()}
    assert (said[DENSE], said[BETTER]) == (["4.99%", ""], ["4.23%", "Pareto front"])


def test_what_verify_found(browser: Browser, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    blobstore.import_model(PYCODE, DENSE, store=store, quant="int4")
    with page_store.served(store) as origin, watched(browser, origin) as site:
        page = site.open("/usage")
        site.expect(page.get_by_text("This store has not been verified yet.")).to_be_visible()
        assert run(["verify", "--store", str(store.root)]) == 0
        verdict = site.open("/usage").locator(".verdict")
        assert verdict.inner_text().startswith("✓ All sound 55")
        damage_largest_blob(store)
        assert run(["verify", "--store", str(store.root)]) == 3
        page = site.open("/usage")
        assert verdict.inner_text().startswith("1 fault 55")
        row = page.get_by_role("table", name="Damaged blobs").locator("tbody tr").inner_text()
        assert DENSE in row
        assert "model.embed_tokens.weight" in row
        site.expect(page.get_by_text("blobstore repair NAME")).to_be_visible()


MARKUP = "img, script[src=x], svg[onload], [onerror], b, script:not([src])"


def escaped(name: str) -> str:
    """Return a name as the command line, and so a page, prints it."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in name)


def test_names_and_texts_of_a_model_are_text(site: Watched) -> None:
    page = site.open("/model", name=HOSTILE)
    assert page_store.HOSTILE_TEXTS["architectures"][0] in page.locator(".lead").inner_text()
    assert page_store.HOSTILE_TEXTS["model_type"] in page.locator(".runs").inner_text()
    site.unfold(page.locator("#summary summary"))
    site.expect(page.get_by_text("<img src=x onerror=alert(11)>.json")).to_be_visible()
    shown = page.locator(".tensors-grid .name a").all_inner_texts()
    assert sorted(shown) == sorted(map(escaped, page_store.HOSTILE_NAMES))
    site.unfold(page.locator("#treemap summary"))
    for name in page_store.HOSTILE_NAMES:
        page.locator(".tensors-grid").get_by_role("link", name=escaped(name), exact=True).click()
        site.settle()
        site.expect(page.locator("#tensor h3")).to_have_text(escaped(name))
        for summary in page.locator("#tensor summary").all():
            site.unfold(summary)
    site.point_at(page.locator("#treemap .role-mark path").first)
    site.expect(page.locator(".tip")).to_contain_text("F16, 1 tensor, 8.19 KB")
    site.expect(page.locator("main").locator(MARKUP)).to_have_count(0)


def test_texts_of_addresses_are_text(site: Watched) -> None:
    fields = ("name", "model", "tensor", "filter", "search", "sort", "type")
    for path in ("/", "/model", "/compare", "/usage"):
        for text in ("<img src=x onerror=alert(1)>", '"><script>alert(2)</script>'):
            page = site.open(path, **dict.fromkeys(fields, text))
            site.expect(page.locator("main").locator(MARKUP)).to_have_count(0)
    site.faults = [fault for fault in site.faults if "status of 4" not in fault]


CUT = """[...document.querySelectorAll(".table, .grid, .cell:not(.name)")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1)
  .map((one) => one.textContent.slice(0, 80))"""
PAGES: dict[str, tuple[str, dict[str, str | list[str]]]] = {
    "models": ("/", {}),
    "a tensor": ("/model", {"name": DENSE, "tensor": GATE, "search": "gate"}),
    "several": ("/compare", {"model": [DENSE, BETTER, WIDER]}),
    "usage": ("/usage", {}),
}


@pytest.mark.parametrize(("window", "theme"), [(WIDE, "light"), (NARROW, "dark")])
def test_axe_is_content(
    browser: Browser, origin: str, window: tuple[int, int], theme: Theme
) -> None:
    with watched(browser, origin, size=window, theme=theme) as site:
        found = {}
        for name, (path, query) in PAGES.items():
            page = site.open(path, **query)
            for summary in page.locator("summary").all():
                if summary.is_visible() and not summary.evaluate("one => one.parentElement.open"):
                    site.unfold(summary)
            found[name] = site.violations()
            assert page.evaluate("document.documentElement.scrollWidth") <= window[0], name
            assert page.evaluate(CUT) == [], name
        assert {name: faults for name, faults in found.items() if faults} == {}


def test_numbers_and_texts_are_those_of_the_command_line(site: Watched) -> None:
    page, values = site.open("/"), random.Random(0)
    numbers = [*range(2050), *range(999_400, 1_000_100), *(step * 125 for step in range(2000))]
    numbers += [values.randrange(10 ** values.randrange(1, 15)) for _ in range(2000)]
    found = page.evaluate(
        """async (numbers) => {
          const units = await import("/static/js/units.js");
          return numbers.map((one) => [units.size(one), units.count(one)]);
        }""",
        numbers,
    )
    assert found == [[size(number), count(number)] for number in numbers]
    shapes = [[], [1], [768, 256], [8, 4, 2]]
    shown = "async (all) => all.map((await import('/static/js/units.js')).shape)"
    assert page.evaluate(shown, shapes) == list(map(shape, shapes))
    texts = ["a\u202eb", "\n\x07", "\U000e0001", "\U0001f600"]
    shown = "async (all) => all.map((await import('/static/js/dom.js')).visible)"
    assert page.evaluate(shown, texts) == list(map(printable, texts))
