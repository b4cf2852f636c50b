"""The heat map: where tensors are drawn, which are left out, how deep models are merged."""

from __future__ import annotations

import pytest
from support.plotted import layer_errors

from blobstore.plots.charts import (
    MOST_ROWS,
    Cell,
    TensorError,
    cells,
    errors,
    layer_and_projection,
)
from blobstore.plots.treemap import module_and_part


def an_error(name: str, relative: float | None = 0.1, *, kept: bool = False) -> TensorError:
    return TensorError(name, "int4", (64, 64), relative, kept)


def at(found: list[Cell]) -> list[tuple[str, int | None]]:
    return [(cell.row, cell.column) for cell in found]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (
            "model.layers.12.mlp.up.weight",
            ((12, "model.layers.*.mlp.up"), ("model.layers.12", "mlp.up")),
        ),
        ("h.3", ((3, "h.*"), ("h.3", ""))),
        ("7.a", ((7, "*.a"), ("7", "a"))),
        ("model.norm.weight", ((None, "model.norm"), ("model", "norm"))),
        ("lm_head.weight", ((None, "lm_head"), ("lm_head", ""))),
        ("weight", ((None, "weight"), ("weight", ""))),
        ("", ((None, ""), ("", ""))),
        ("layers.1.experts.2.up", ((1, "layers.*.experts.*.up"), ("layers.1", "experts.2.up"))),
        ("layer1.up", ((None, "layer1.up"), ("layer1", "up"))),
        ("layers.1234567890.up", ((None, "layers.1234567890.up"), ("layers.1234567890", "up"))),
    ],
)
def test_names_are_places(name: str, place: object) -> None:
    assert (layer_and_projection(name), module_and_part(name)) == place


def test_layers_are_columns_and_other_tensors_are_rows() -> None:
    found = cells([an_error("norm"), an_error("l.10.up"), an_error("l.2.up"), an_error("l.2.down")])
    assert at(found) == [("l.*.down", 2), ("l.*.up", 2), ("l.*.up", 10), ("norm", None)]


def test_what_was_not_measured_is_left_out() -> None:
    assert cells([an_error("a", None), an_error("b", 0.0, kept=True)]) == []
    assert "1 tensor stored unchanged" in errors([an_error("b", 0.0, kept=True)])["description"]


def test_tensors_in_one_place_are_drawn_as_the_worst() -> None:
    (cell,) = cells([an_error(f"l.0.experts.{n}.up", error) for n, error in enumerate((1, 3, 2))])
    assert (cell.worst.name, cell.error, cell.tensors) == ("l.0.experts.1.up", 3, 3)


def test_of_many_rows_the_worst_are_drawn() -> None:
    wide = cells([an_error(f"t{n}", n / 1000) for n in range(1000)])
    assert sorted(cell.error for cell in wide) == [n / 1000 for n in range(1000 - MOST_ROWS, 1000)]


def test_the_document() -> None:
    spec = errors(layer_errors(3))
    data = {table["name"]: table["values"] for table in spec["data"]}
    assert (len(data["cells"]), len(data["rows"])) == (9, 1)
    scales = {scale["name"]: scale["domain"] for scale in spec["scales"]}
    assert scales["row"] == ["down", "q_proj", "up", "lm_head"]
    assert scales["column"] == [0, 1, 2]
    shown = [float(row[2].rstrip("%")) for row in spec["usermeta"]["table"]["rows"]]
    assert shown == sorted(shown, reverse=True)


def test_rows_of_one_short_name_keep_their_names_apart() -> None:
    both = [
        an_error("a.layers.0.up"),
        an_error("a.layers.0.down"),
        an_error("b.up"),
        an_error("b.down"),
    ]
    (rows, *_) = (scale["domain"] for scale in errors(both)["scales"] if scale["name"] == "row")
    assert len(set(rows)) == 4
