"""A heat map: the error of each projection in each layer.

Layers are columns, projections rows. A tensor outside the layers has a row of its own. Tensors that
are in one place (the experts of a layer, layers of a very deep model) are drawn as the worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from blobstore.plots.specification import Specification, TensorError, empty, specification, tip_of
from blobstore.plots.treemap import layer_and_projection, natural, shortened_names
from blobstore.views.quantities import counted, printable

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
    order = sorted(found, key=lambda cell: (-cell.error, cell.worst.name))
    worst = max(found, key=lambda cell: (cell.error, cell.worst.name))
    low, high = order[-1].error, order[0].error
    description = (
        f"Heat map: relative rmse of each tensor, by layer and projection, from {low:.3%} to"
        f" {high:.3%} in {worst.worst.name}.{same}"
    )
    labels = row_labels(found)
    rows = [labels[row] for row in dict.fromkeys(cell.row for cell in found)]
    columns = sorted({cell.column for cell in found if cell.column is not None})
    drawn = [(cell.column, _drawn(cell, labels[cell.row])) for cell in found]
    plot = specification(
        "heatmap",
        description,
        height=_CELL * len(rows) + 110,
        table=(
            ("tensor", "type", "relative rmse", "tensors"),
            [
                (cell.worst.name, cell.worst.type_name, f"{cell.error:.3%}", cell.tensors)
                for cell in order
            ],
        ),
        data={
            "cells": [row | {"column": column} for column, row in drawn if column is not None],
            "rows": [row for column, row in drawn if column is None],
        },
        domains={
            "row": rows,
            "column": columns,
            # Nearly equal errors have one colour.
            "error": [0.0 if high - low < 0.05 * high else low, high],
        },
    )
    if not columns:
        plot["axes"] = [axis for axis in plot["axes"] if axis["scale"] == "row"]
    return plot


def _drawn(cell: Cell, label: str) -> dict[str, Any]:
    more = f", the worst of {cell.tensors}" if cell.tensors > 1 else ""
    says = f"{cell.worst.type_name}, relative rmse {cell.error:.3%}"
    return {"row": label, "error": cell.error, "tip": tip_of(f"{cell.worst.name}{more}", says)}


def row_labels(found: list[Cell]) -> dict[str, str]:
    """Return short names of the rows, which are all different."""
    rows = dict.fromkeys((cell.row, cell.column is None) for cell in found)
    parts = ([row for row, alone in rows if alone is wanted] for wanted in (False, True))
    labels = {row: label for part in parts for row, label in shortened_names(part).items()}
    return labels if len(set(labels.values())) == len(labels) else {row: row for row in labels}


_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = ".:-=+*#@"
_COLOURS = (36, 36, 32, 32, 33, 33, 31, 31)
"""Of a terminal, by level: cyan, green, yellow, red."""
_MOST_LINES = 30
_LEAST_BARS = 8
_FIGURE = 9
_WIDEST = 4
"""Characters of a bar, if there are few layers."""


def error_lines(
    tensors: Iterable[TensorError], width: int, *, ascii_only: bool, colours: bool
) -> list[str]:
    """Return the lines of the plot, each at most ``width`` characters wide; [] without an error.

    Bars grow from 0 to the largest relative rmse. If there are more layers than fit, a bar is the
    worst of several. Only the thirty worst projections are shown.
    """
    found = cells(tensors)
    highest = max((cell.error for cell in found), default=0.0)
    if not highest:
        return []
    rows: dict[str, list[Cell]] = {}
    for cell in found:
        rows.setdefault(cell.row, []).append(cell)
    largest = {row: max(cell.error for cell in rows[row]) for row in rows}
    worst = sorted(rows, key=lambda row: -largest[row])[:_MOST_LINES]
    labels = {row: printable(label) for row, label in row_labels(found).items() if row in worst}
    layers = sorted({cell.column for cell in found if cell.column is not None})
    room_of_names = max(12, width - _FIGURE - 2 - max(_LEAST_BARS, len(layers)))
    names = min(max(map(len, labels.values())), room_of_names)
    room = max(1, width - names - _FIGURE - 2)
    bars = max(1, min(len(layers), room))
    each = max(1, min(_WIDEST, room // bars))
    signs, cut = (_ASCII, "~") if ascii_only else (_BLOCKS, "…")

    def drawn(value: float | None) -> str:
        if value is None:
            return " " * each
        level = min(len(signs) - 1, int(value / highest * len(signs)))
        sign = signs[level] * each
        return f"\x1b[{_COLOURS[level]}m{sign}\x1b[0m" if colours else sign

    first = f" of layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else ""
    lines = [f"Relative rmse{first}, and the largest"[:width]]
    for row, label in labels.items():
        name = label if len(label) <= names else f"{cut}{label[1 - names :]}"
        plot = "".join(map(drawn, _merged(rows[row], layers, bars)))
        lines.append(f"{name:<{names}} {plot} {largest[row]:>{_FIGURE - 1}.3%}")
    return lines


def _merged(row: list[Cell], layers: Sequence[int], bars: int) -> list[float | None]:
    """Return the worst error of each bar; a tensor outside the layers is the first bar."""
    found: list[float | None] = [None] * bars
    places = {layer: index * bars // len(layers) for index, layer in enumerate(layers)}
    for cell in row:
        place = 0 if cell.column is None else places[cell.column]
        found[place] = max(found[place] or 0.0, cell.error)
    return found
