"""Charts: which tensors and models are drawn, where, and the plot of a terminal."""

import pytest
from support.plotted import HOSTILE, layer_errors

from blobstore.plots.charts import (
    MOST_POINTS,
    MOST_ROWS,
    ModelPoint,
    TensorError,
    cells,
    error_lines,
    errors,
    frontier,
    layer_and_projection,
    scatter,
)
from blobstore.plots.treemap import module_and_part


def an_error(name: str, relative: float | None = 0.1, *, kept: bool = False) -> TensorError:
    return TensorError(name, "int4", (64, 64), relative, kept)


@pytest.mark.parametrize(
    ("name", "place", "module"),
    [
        ("model.layers.12.mlp.up.weight", (12, "model.layers.*.mlp.up"), "model.layers.12"),
        ("layers.1.experts.2.up", (1, "layers.*.experts.*.up"), "layers.1"),
        ("lm_head.weight", (None, "lm_head"), "lm_head"),
        ("layers.1234567890.up", (None, "layers.1234567890.up"), "layers.1234567890"),
    ],
)
def test_a_name_gives_layer_projection_and_module(
    name: str, place: tuple[int | None, str], module: str
) -> None:
    assert layer_and_projection(name) == place
    assert module_and_part(name)[0] == module


def test_of_many_tensors_the_worst_are_drawn() -> None:
    (cell,) = cells([an_error(f"l.0.experts.{n}.up", error) for n, error in enumerate((1, 3, 2))])
    assert (cell.worst.name, cell.error, cell.tensors) == ("l.0.experts.1.up", 3, 3)
    wide = cells([an_error(f"t{n}", n / 1000) for n in range(1000)])
    assert sorted(cell.error for cell in wide) == [n / 1000 for n in range(1000 - MOST_ROWS, 1000)]
    spec = scatter([an_error(f"t{n}", n / 5000) for n in range(5000)])
    points = spec["data"][0]["values"]
    assert len(points) == MOST_POINTS
    assert points[0]["y"] == 4999 / 5000
    assert "The 1,500 worst are drawn." in spec["description"]


def test_the_heat_map_has_a_cell_for_each_tensor_and_a_table_by_error() -> None:
    spec = errors(layer_errors(3))
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
        ModelPoint("small", "int4", 10, 0.3),
        ModelPoint("beaten", "nvfp4", 12, 0.4),
        ModelPoint("twin", "int4", 10, 0.3),
        ModelPoint("large", "int8", 20, 0.1),
        ModelPoint("beaten too", "mxfp8", 30, 0.1),
    ]
    spec = frontier(reversed(models))
    rows = spec["usermeta"]["table"]["rows"]
    assert {row[0] for row in rows if row[-1] == "yes"} == {"small", "large"}
    assert spec["data"][1]["values"] == [{"x": 10, "y": 0.3}, {"x": 20, "y": 0.1}]


# In a terminal


def lines_of(found: list[TensorError], width: int = 80, **options: bool) -> list[str]:
    lines = error_lines(found, width, **({"ascii_only": False, "colours": False} | options))
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
