"""Charts, specifications and treemaps: what is drawn, where, in which colours; bundled scripts."""

import hashlib
import json
import random
import re
from typing import Any

from hypothesis import given, strategies as st
from support import ROOT
from support.plotted import HOSTILE, SPECIFICATIONS, layer_errors

from blobstore.formats.dtypes import DType, QuantType
from blobstore.plots import charts
from blobstore.plots.specification import COLOURS, family_of_type
from blobstore.plots.treemap import module_and_part, rectangles, treemap


def an_error(name: str, relative: float | None = 0.1, *, kept: bool = False) -> charts.TensorError:
    return charts.TensorError(name, "int4", (64, 64), relative, kept)


def test_what_a_name_gives() -> None:
    for name, place, module in (
        ("model.layers.12.mlp.up.weight", (12, "model.layers.*.mlp.up"), "model.layers.12"),
        ("layers.1.experts.2.up", (1, "layers.*.experts.*.up"), "layers.1"),
        ("lm_head.weight", (None, "lm_head"), "lm_head"),
        ("layers.1234567890.up", (None, "layers.1234567890.up"), "layers.1234567890"),
    ):
        assert (charts.layer_and_projection(name), module_and_part(name)[0]) == (place, module)


def test_of_many_tensors_the_worst_are_drawn() -> None:
    (cell,) = charts.cells([an_error(f"l.0.experts.{n}.up", e) for n, e in enumerate((1, 3, 2))])
    assert (cell.worst.name, cell.worst.error, cell.tensors) == ("l.0.experts.1.up", 3, 3)
    wide = charts.cells([an_error(f"t{n}", n) for n in range(1000)])
    assert sorted(c.worst.error for c in wide) == [*range(1000 - charts.MOST_ROWS, 1000)]
    spec = charts.scatter([an_error(f"t{n}", n / 5000) for n in range(5000)])
    points = spec["data"][0]["values"]
    assert len(points) == charts.MOST_POINTS
    assert points[0]["y"] == 4999 / 5000
    assert "The 1,500 worst are drawn." in spec["description"]


def test_the_heat_map_has_a_cell_for_each_tensor_and_a_table_by_error() -> None:
    spec = charts.errors(layer_errors(3))
    data = {table["name"]: table["values"] for table in spec["data"]}
    assert (len(data["cells"]), len(data["rows"])) == (9, 1)
    scales = {scale["name"]: scale["domain"] for scale in spec["scales"]}
    assert scales["row"] == ["down", "q_proj", "up", "lm_head"]
    assert scales["column"] == [0, 1, 2]
    assert "1 tensor stored unchanged" in spec["description"]
    shown = [float(row[2].rstrip("%")) for row in spec["usermeta"]["table"]["rows"]]
    assert shown == sorted(shown, reverse=True)


def test_the_front_has_the_models_that_none_beats() -> None:
    models = [
        charts.ModelPoint("small", "int4", 10, 0.3),
        charts.ModelPoint("beaten", "nvfp4", 12, 0.4),
        charts.ModelPoint("twin", "int4", 10, 0.3),
        charts.ModelPoint("large", "int8", 20, 0.1),
        charts.ModelPoint("beaten too", "mxfp8", 30, 0.1),
    ]
    spec = charts.frontier(reversed(models))
    rows = spec["usermeta"]["table"]["rows"]
    assert {row[0] for row in rows if row[-1] == "yes"} == {"small", "large"}
    assert spec["data"][1]["values"] == [{"x": 10, "y": 0.3}, {"x": 20, "y": 0.1}]


def lines_of(found: list[charts.TensorError], width: int = 80, **options: bool) -> list[str]:
    lines = charts.error_lines(found, width, **({"ascii_only": False, "colours": False} | options))
    assert max(map(len, lines), default=0) <= width or options.get("colours")
    return lines


def test_bars_of_a_terminal_are_errors() -> None:
    (_, line) = lines_of([an_error(f"l.{n}.up", n / 8) for n in range(1, 9)])
    assert "".join(dict.fromkeys(line.split()[1])) == "▂▃▄▅▆▇█"
    assert line.endswith("100.000%")
    assert lines_of([an_error("a", 0.0, kept=True)]) == []
    assert len(lines_of(layer_errors(500), 40)) == 5


def test_a_terminal_gets_ascii_colours_and_harmless_names_as_asked() -> None:
    plain = "\n".join(lines_of(layer_errors(4), ascii_only=True))
    assert plain.isascii()
    assert "\x1b" not in plain
    assert "\x1b[31m" in "\n".join(lines_of(layer_errors(4), colours=True))
    assert all(line.isprintable() for line in lines_of(layer_errors(2, HOSTILE), 200))


MEANINGFUL = {*COLOURS.values(), "#000000", "#ffffff"}


def test_every_type_has_a_colour_of_its_own() -> None:
    assert {family_of_type(str(kind)) for kind in [*QuantType, *DType]} <= COLOURS.keys()
    assert all(family_of_type(f"{kind}/{kind.group_sizes[0]}") == str(kind) for kind in QuantType)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_specifications_have_no_other_colour_no_font_and_no_address() -> None:
    for name, spec in SPECIFICATIONS.items():
        text = json.dumps(spec)
        assert set(re.findall("#[0-9a-fA-F]{3,8}", text)) <= MEANINGFUL, name
        assert '"font"' not in text
        assert "http" not in text.replace("https://vega.github.io/schema/vega/v6.json", "")


def test_hostile_names_are_printable_text_in_specifications() -> None:
    for name, spec in SPECIFICATIONS.items():
        text = json.dumps(spec, ensure_ascii=False)
        assert text.isprintable(), name
        assert ("<img src=x" in text) == name.startswith("hostile")


def test_specifications_have_a_description_and_their_values_as_a_table() -> None:
    for name, spec in SPECIFICATIONS.items():
        table = spec["usermeta"]["table"]
        assert spec["description"].endswith((".", "%"))
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
        assert bool(table["rows"]) is not name.startswith("empty")


def tensors_named(names: list[str]) -> list[tuple[str, str, int]]:
    sizes = random.Random(1)
    types = ("int4/64", "BF16", "nvfp4/16")
    return [(name, types[index % 3], sizes.randrange(10**6)) for index, name in enumerate(names)]


LAYERS = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(12)]
SMALL = tensors_named(["model.embed_tokens.weight", "lm_head.weight", *LAYERS])
ODD = ["", ".", "a", "a.", ".5", "5", "model.layers.3", "é.1.é", "a." * 40 + "weight", "a..1..b"]
names = st.lists(st.text("ab.019\x00é", max_size=12), max_size=30)


@given(names, st.integers(3, 40))
def test_rectangles_have_all_bytes_and_tensors(found: list[str], most: int) -> None:
    tensors = tensors_named([*found, *ODD])
    drawn = rectangles(tensors, most)
    assert sum(one.nbytes for one in drawn) == sum(nbytes for _, _, nbytes in tensors)
    assert sum(one.tensors for one in drawn) == len(tensors)
    assert len(drawn) <= most


def test_the_document() -> None:
    spec = treemap(SMALL)
    (tree, *_) = spec["data"]
    rows: list[dict[str, Any]] = tree["values"]
    assert all(row["parent"] < row["id"] for row in rows[1:])
    assert sum(row.get("bytes", 0) for row in rows) == sum(nbytes for _, _, nbytes in SMALL)
    layers = [row["name"] for row in rows if row.get("parent") == 0]
    assert layers == ["lm_head", "model", *(f"layers.{n}" for n in range(12))]  # 2 before 10
    assert {row["type"] for row in rows if "type" in row} <= set(COLOURS)
    assert len(spec["usermeta"]["table"]["rows"]) == len(SMALL)
    shuffled = random.Random(2).sample(SMALL, len(SMALL))
    assert json.dumps(treemap(shuffled)) == json.dumps(spec)
    assert treemap([("a", "BF16", 0)])["signals"][0]["value"] == "No bytes to show."


VENDOR = ROOT / "src/blobstore/web/static/vendor"
VENDORED = json.loads((VENDOR / "vendored.json").read_text())
FILES = {r["file"]: r["sha256"] for r in [*VENDORED["packages"].values(), VENDORED["licences"]]}


def test_bundled_files_have_their_digests_and_are_all() -> None:
    found = {path.name: path.read_bytes() for path in VENDOR.iterdir()}
    del found["vendored.json"]
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == FILES
