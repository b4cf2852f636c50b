"""Pages in one file: what they may do and contain; the same input gives the same bytes."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import PYCODE
from support.checkpoints import raw_safetensors, small_tensors, write_checkpoint
from support.plotted import HOSTILE, layer_errors

import blobstore
from blobstore.errors import UnsupportedSourceError
from blobstore.importer.policies.options import ImportOptions
from blobstore.importer.run import plan_import
from blobstore.names import ModelName
from blobstore.plots.specification import Specification
from blobstore.plots.treemap import treemap
from blobstore.report.gathering import gather
from blobstore.report.model_page import model_page, model_plots
from blobstore.report.page import document, figure
from blobstore.report.plan_choices import plan_choices
from blobstore.report.plan_page import plan_page
from blobstore.store.local.store import Store, open_store

SCRIPT = re.compile(
    r"<script(?: type=\"(?P<type>[a-z/]+)\")?[^>]*>(?P<text>.*?)</script>", re.DOTALL
)


def policy_of(page: str) -> str:
    match = re.search('http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert match is not None
    return match[1].replace("&#x27;", "'")


def plots_of(page: str) -> dict[str, Any]:
    match = re.search('<script type="application/json" id="plots">(.*?)</script>', page)
    assert match is not None
    plots: dict[str, Any] = json.loads(match[1])
    return plots


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("report")
    found = open_store(folder / "store")
    blobstore.import_model(PYCODE, "tiny:int4", store=found, quant="int4")
    blobstore.import_model(PYCODE, "tiny:int8", store=found, quant="int8")
    return found


@pytest.fixture(scope="module")
def page(store: Store) -> str:
    found = gather("tiny:int4", store=store, against=str(PYCODE))
    return model_page(found, model_plots(found), None).decode()


def test_only_its_own_scripts_and_style_may_run(page: str) -> None:
    policy = dict(part.split(" ", 1) for part in policy_of(page).split("; "))
    scripts = [
        match["text"] for match in SCRIPT.finditer(page) if match["type"] != "application/json"
    ]
    assert policy["default-src"] == "'none'"
    assert policy["script-src"].split() == [hashed(script) for script in scripts]
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    assert policy["style-src"] == hashed(style)
    assert "unsafe" not in policy_of(page)


def test_nothing_is_asked_of_anywhere(page: str) -> None:
    markup = SCRIPT.sub("", page).replace(" content=", " ")
    assert not re.search(r"\b(src|href|action|srcset|poster|style|on[a-z]+)=", markup)
    assert not re.search(r"@import|url\(", markup)


def test_it_shows_every_part(page: str) -> None:
    for title in ("Bytes by module", "Errors", "Distributions", "How this page was made"):
        assert f"<h2>{title}</h2>" in page
    plots = plots_of(page)
    assert list(plots)[:4] == ["treemap", "errors", "scatter", "distribution-1"]
    assert set(re.findall('<figure data-plot="([^"]*)"', page)) == set(plots)
    assert "usermeta" not in json.dumps(plots)
    assert f"against the checkpoint {PYCODE.name}" in page
    assert str(PYCODE) not in page  # a path of this machine


def test_the_same_input_gives_the_same_bytes(store: Store, page: str) -> None:
    found = gather("tiny:int4", store=store, against=str(PYCODE), jobs=1)
    assert model_page(found, model_plots(found), None).decode() == page
    assert "<dd>today</dd>" in model_page(found, model_plots(found), "today").decode()


def test_against_another_model(store: Store) -> None:
    found = gather("tiny:int4", store=store, against=ModelName.parse("tiny:int8"))
    assert found.difference is not None
    assert found.errors is not None
    assert {one.name for one in found.errors} == {
        one.after.name for one in found.difference.changed
    }
    assert all(one.source is not None for one in found.distributions)
    text = model_page(found, model_plots(found), None).decode()
    assert "<h2>Differences from tiny:int8</h2>" in text


def test_without_another_side_it_says_how_to_measure(store: Store) -> None:
    found = gather("tiny:int8", store=store)
    assert (found.errors, found.basis) == (None, None)
    text = model_page(found, model_plots(found), None).decode()
    assert "blobstore report tiny:int8 --against SOURCE measures it" in text


def test_a_model_without_tensors_is_refused(store: Store) -> None:
    from support.stores import commit_model

    commit_model(store, "gguf")
    with pytest.raises(UnsupportedSourceError):
        gather("gguf", store=store)


@pytest.mark.parametrize("number", [1000, 50_000])
def test_pages_of_many_tensors_are_small(number: int) -> None:
    from support.large_models import tensor_names
    from support.plotted import PlotTensor

    from blobstore.plots.heatmap import errors
    from blobstore.plots.points import scatter

    tensors = [PlotTensor(name, "int4/64", (64, 64), 2304) for name in tensor_names(number)]
    plots = {
        "treemap": treemap(tensors),
        "errors": errors(layer_errors(number // 3)),
        "scatter": scatter(layer_errors(number // 3)),
    }
    found = document("large", [figure(name, plot) for name, plot in plots.items()], plots)
    assert len(found) < 2_000_000


def test_hostile_names_are_text() -> None:
    plot: Specification = treemap([])
    page = document(
        HOSTILE, [figure(HOSTILE, plot | {"description": HOSTILE})], {HOSTILE: plot}
    ).decode()
    assert "<img" not in page
    assert "\u202e" not in page
    assert list(plots_of(page)) == [HOSTILE]
    assert page.count("</script>") == 4


def test_a_tensor_without_a_histogram_is_named(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", small_tensors())
    header = {"odd": {"dtype": "C64", "shape": [2], "data_offsets": [0, 16]}}
    (source / "model.safetensors").write_bytes(raw_safetensors(header, bytes(16)))
    store = open_store(tmp_path / "store")
    blobstore.import_model(source, "m", store=store)
    found = gather("m", store=store)
    assert found.distributions == ()
    page = model_page(found, model_plots(found), None).decode()
    assert "Without a histogram: &#x27;odd&#x27; is complex: it has no histogram." in page


def test_a_plan_shows_all_types(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", small_tensors())
    words = {"quant": "int8", "group_size": 32}
    asked = plan_import(source, **words)  # type: ignore[arg-type]
    found = plan_choices(asked, ImportOptions.parse(**words))  # type: ignore[arg-type]
    labels = [one.label for one in found.plans]
    assert labels == [
        *("int4/32", "int4/64", "int4/128", "int8/32", "int8/64", "int8/128"),
        *("nvfp4/16", "mxfp4/32", "mxfp8/32", "unquantized"),
    ]
    assert found.refused == {}
    assert found.chosen is not None
    assert found.chosen.stored_bytes == asked.stored_bytes
    for one in found.plans:
        alone = plan_import(
            source, quant=one.quant_type and str(one.quant_type), group_size=one.group_size
        )
        assert (alone.stored_bytes, alone.bits_per_weight) == (
            one.stored_bytes,
            one.bits_per_weight,
        )
    assert found.reach is not None
    smallest, largest = found.reach
    sizes = [one.stored_bytes for one in found.plans]
    assert smallest <= min(sizes) <= max(sizes) <= largest + 64
    page = plan_page(found).decode()
    assert page == plan_page(found).decode()
    assert set(re.findall('data-plan="([^"]*)"', page)) == {one.key for one in found.plans}
    assert str(tmp_path) not in page


def test_a_plan_for_a_target_is_shown_first(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", small_tensors())
    asked = plan_import(source, target_bpw=9)
    found = plan_choices(asked, ImportOptions.parse())
    assert found.chosen is None
    assert next(iter(plots_of(plan_page(found).decode()))) == "asked"
