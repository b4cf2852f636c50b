"""A heat map: the error of each projection in each layer.

Layers are columns, projections rows. A tensor outside the layers has a row of its own. Tensors that
are in one place (the experts of a layer, layers of a very deep model) are drawn as the worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from blobstore.plots.modules import layer_and_projection, natural, shortened_names
from blobstore.plots.specification import Specification, empty, specification, tip_of
from blobstore.plots.subjects import TensorError
from blobstore.views.quantities import counted

MOST_COLUMNS = 200
MOST_ROWS = 60
_CELL = 18


class Cell(NamedTuple):
    """The worst of the tensors in one place; ``column`` is the first layer, or None."""

    row: str
    column: int | None
    worst: TensorError
    tensors: int

    @property
    def error(self) -> float:
        """Its relative rmse."""
        return self.worst.relative_rmse or 0.0


def cells(tensors: Iterable[TensorError]) -> list[Cell]:
    """Return the cells of all tensors that were measured and not kept, row by row.

    Rows beyond the sixty worst are left out.
    """
    measured = [one for one in tensors if not one.kept and one.relative_rmse is not None]
    places = [(*layer_and_projection(one.name), one) for one in measured]
    layers = sorted({layer for layer, _, _ in places if layer is not None})
    step = -(-len(layers) // MOST_COLUMNS) or 1
    column_of = {layer: layers[index - index % step] for index, layer in enumerate(layers)}
    found: dict[tuple[str, int | None], Cell] = {}
    for layer, row, one in places:
        column = None if layer is None else column_of[layer]
        before = found.get((row, column))
        cell = Cell(row, column, one, 1 if before is None else before.tensors + 1)
        if before is not None and before.error >= cell.error:
            cell = cell._replace(worst=before.worst)
        found[row, column] = cell
    return _worst_rows(list(found.values()))


def _worst_rows(found: list[Cell]) -> list[Cell]:
    worst: dict[str, float] = {}
    for cell in found:
        worst[cell.row] = max(worst.get(cell.row, 0.0), cell.error)
    rows = set(sorted(worst, key=lambda row: (-worst[row], row))[:MOST_ROWS])
    chosen = [cell for cell in found if cell.row in rows]
    # Rows of layers first, in the order of their names; columns from left to right.
    return sorted(
        chosen,
        key=lambda cell: (cell.column is None, natural([cell.row]), cell.column or 0),
    )


def errors(tensors: Iterable[TensorError]) -> Specification:
    """Return the heat map of the relative rmse of tensors against their source."""
    listed = list(tensors)
    found = cells(listed)
    kept = sum(one.kept for one in listed)
    same = f" {counted(kept, 'tensor')} stored unchanged." if kept else ""
    if not found:
        return empty(f"Errors by layer: no tensor was changed.{same}", "No tensor was changed.")
    worst = max(found, key=lambda cell: (cell.error, cell.worst.name))
    description = (
        "Heat map: relative rmse of each tensor, by layer and projection, from"
        f" {min(cell.error for cell in found):.3%} to {worst.error:.3%} in"
        f" {worst.worst.name}.{same}"
    )
    rows = list(dict.fromkeys(cell.row for cell in found))
    labels = row_labels(found)
    columns = sorted({cell.column for cell in found if cell.column is not None})
    return specification(
        description,
        height=_CELL * len(rows) + 110,
        columns=("tensor", "type", "relative rmse", "tensors"),
        rows=[
            (cell.worst.name, cell.worst.type_name, f"{cell.error:.3%}", cell.tensors)
            for cell in sorted(found, key=lambda cell: (-cell.error, cell.worst.name))
        ],
        data=_data(found, labels),
        scales=_scales(found, [labels[row] for row in rows], columns),
        axes=_axes(columns),
        legends=[_legend()],
        marks=[
            _mark("cells", {"scale": "column", "field": "column"}, {"scale": "column", "band": 1}),
            _mark("rows", {"value": 0}, {"signal": "width"}),
        ],
    )


def row_labels(found: list[Cell]) -> dict[str, str]:
    """Return short names of the rows, which are all different."""
    rows = dict.fromkeys((cell.row, cell.column is None) for cell in found)
    parts = ([row for row, alone in rows if alone is wanted] for wanted in (False, True))
    labels = {row: label for part in parts for row, label in shortened_names(part).items()}
    return labels if len(set(labels.values())) == len(labels) else {row: row for row in labels}


def _data(found: list[Cell], labels: Mapping[str, str]) -> list[dict[str, Any]]:
    def row(cell: Cell) -> dict[str, Any]:
        more = f", the worst of {cell.tensors}" if cell.tensors > 1 else ""
        said = f"{cell.worst.type_name}, relative rmse {cell.error:.3%}"
        tip = tip_of(f"{cell.worst.name}{more}", said)
        place = {} if cell.column is None else {"column": cell.column}
        return {"row": labels[cell.row], **place, "error": cell.error, "tip": tip}

    return [
        {"name": "cells", "values": [row(cell) for cell in found if cell.column is not None]},
        {"name": "rows", "values": [row(cell) for cell in found if cell.column is None]},
    ]


def _scales(found: list[Cell], rows: list[str], columns: list[int]) -> list[dict[str, Any]]:
    low, high = (pick(cell.error for cell in found) for pick in (min, max))
    if high - low < 0.05 * high:  # nearly equal errors have one colour
        low = 0.0
    return [
        {"name": "row", "type": "band", "domain": rows, "range": "height"},
        {"name": "column", "type": "band", "domain": columns, "range": "width"},
        {"name": "error", "type": "linear", "domain": [low, high], "range": "ramp", "nice": True},
    ]


def _axes(columns: list[int]) -> list[dict[str, Any]]:
    named = {"orient": "left", "scale": "row", "ticks": False, "domain": False}
    named |= {"labelLimit": {"signal": "width < 420 ? 150 : 260"}, "labelPadding": 6}
    if not columns:
        return [named]
    title = {"orient": "bottom", "scale": "column", "title": "layer", "labelOverlap": True}
    return [named, title | {"ticks": False, "domain": False, "labelAngle": 0}]


def _legend() -> dict[str, Any]:
    return {
        "fill": "error",
        "type": "gradient",
        "orient": "top",
        "direction": "horizontal",
        "title": "relative rmse",
        "format": ".2~%",
        "gradientLength": {"signal": "clamp(width / 2, 120, 240)"},
    }


def _mark(data: str, x: dict[str, Any], width: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "rect",
        "from": {"data": data},
        "aria": False,
        "style": "cell",
        "encode": {
            "update": {
                "x": x,
                "width": width,
                "y": {"scale": "row", "field": "row"},
                "height": {"scale": "row", "band": 1},
                "fill": {"scale": "error", "field": "error"},
                "tooltip": {"field": "tip"},
            }
        },
    }
