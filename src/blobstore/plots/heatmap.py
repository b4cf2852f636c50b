"""A heat map: the error of each projection in each layer; on a terminal as text.

Layers are columns, projections rows: the layer of ``model.layers.3.mlp.experts.7.up_proj`` is
3, its projection ``model.layers.*.mlp.experts.*.up_proj``. A tensor outside the layers has a row of
its own. Tensors in one place (the experts of a layer) are drawn as the worst.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from blobstore.inspection.comparison import ChangedTensor
from blobstore.plots.specification import Specification, empty, specification, tip_of
from blobstore.plots.treemap import FIRST_NUMBER, LONGEST, WEIGHT, natural, starred
from blobstore.views.quantities import counted, printable

MOST_ROWS = 60
_CELL = 18


@dataclass(frozen=True, slots=True)
class TensorError:
    """The error of a tensor against the one that it was made from.

    ``relative_rmse``: None if all weights are zero and the stored ones are not. ``kept``: it is
    stored as it was.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    relative_rmse: float | None
    kept: bool = False

    @property
    def error(self) -> float:
        return self.relative_rmse or 0.0

    @classmethod
    def of_document(cls, tensor: Mapping[str, Any]) -> TensorError:
        """Return the error that a store kept, as ``quality --json`` prints it."""
        kind, shape = tensor["quant_type"] or tensor["dtype"] or "", tuple(tensor["shape"])
        return cls(tensor["name"], kind, shape, tensor["relative_rmse"], tensor["kept"])

    @classmethod
    def of_change(cls, change: ChangedTensor) -> TensorError:
        """Return the error of a tensor against that of another model; None if not measured."""
        relative = None if change.errors is None else change.errors.relative_rmse
        return cls(change.after.name, change.after.type_name, change.after.shape, relative)


class Cell(NamedTuple):
    """The worst of the tensors in one place; ``column`` is the layer, or None."""

    row: str
    column: int | None
    worst: TensorError
    tensors: int

    @property
    def error(self) -> float:
        return self.worst.error


def worst_first(tensors: Iterable[TensorError]) -> list[TensorError]:
    """Return the tensors that have an error, the largest first."""
    changed = (one for one in tensors if one.error and not one.kept)
    return sorted(changed, key=lambda one: (-one.error, one.name))


def layer_and_projection(name: str) -> tuple[int | None, str]:
    """Return a tensor's layer, None without one, and its name with a star for each number."""
    name = name.removesuffix(WEIGHT)
    match = FIRST_NUMBER.search(name)
    if match is None:
        return None, name
    return int(match[0]), f"{name[: match.start()]}*{starred(name[match.end() :])}"


def cells(tensors: Iterable[TensorError]) -> list[Cell]:
    """Return the cells of all tensors that were measured and not kept, row by row.

    Rows of layers are first, in the order of their names; columns from left to right. Rows beyond
    the sixty worst are left out.
    """
    found: dict[tuple[int | None, str], Cell] = {}
    for one in tensors:
        if one.kept or one.relative_rmse is None:
            continue
        place = layer, row = layer_and_projection(one.name)
        before = found.get(place, Cell(row, layer, one, 0))
        worst = max(before.worst, one, key=lambda tensor: tensor.error)
        found[place] = Cell(row, layer, worst, before.tensors + 1)
    rows = _worst_rows(found.values(), MOST_ROWS)
    return sorted(
        (cell for cell in found.values() if cell.row in rows),
        key=lambda cell: (cell.column is None, natural([cell.row]), cell.column or 0),
    )


def _worst_rows(found: Iterable[Cell], most: int) -> dict[str, float]:
    """Return the largest errors of the rows where they are largest."""
    errors = {cell.row: cell.error for cell in sorted(found, key=lambda cell: cell.error)}
    rows = sorted(errors, key=lambda row: (-errors[row], row))
    return {row: errors[row] for row in rows[:most]}


def row_labels(found: list[Cell]) -> dict[str, str]:
    """Return short names of the rows, which are all different."""
    labels: dict[str, str] = {}
    for is_alone in (False, True):
        rows = (cell.row for cell in found if (cell.column is None) == is_alone)
        labels |= _shortened(list(dict.fromkeys(rows)))
    return labels if len(set(labels.values())) == len(labels) else {row: row for row in labels}


def _shortened(names: list[str]) -> dict[str, str]:
    """Return short labels by name: without the leading words that all have in common.

    A label keeps at least one word, and at most 120 characters. One name shares nothing.
    """
    common = 0
    if len(names) > 1:
        common = len(os.path.commonprefix([name.split(".")[:-1] for name in names]))  # noqa: RUF071  # lists of words
    return {name: ".".join(name.split(".")[common:])[:LONGEST] for name in names}


def errors(tensors: Iterable[TensorError]) -> Specification:
    """Return the heat map of the relative rmse of tensors against their source."""
    listed = list(tensors)
    found = cells(listed)
    kept = sum(one.kept for one in listed)
    same = f" {counted(kept, 'tensor')} stored unchanged." if kept else ""
    if not found:
        return empty(f"Errors by layer: no tensor was changed.{same}", "No tensor was changed.")
    order = sorted(found, key=lambda cell: (-cell.error, cell.worst.name))
    low, high = order[-1].error, order[0].error
    description = (
        f"Heat map: relative rmse of each tensor, by layer and projection, from {low:.3%} to"
        f" {high:.3%} in {order[0].worst.name}.{same}"
    )
    labels = row_labels(found)
    rows = [labels[row] for row in dict.fromkeys(cell.row for cell in found)]
    columns = sorted({cell.column for cell in found if cell.column is not None})
    drawn = [_drawn(cell, labels[cell.row]) for cell in found]
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
            "cells": [row for row in drawn if row["column"] is not None],
            "rows": [row for row in drawn if row["column"] is None],
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
    tip = tip_of(f"{cell.worst.name}{more}", says)
    return {"row": label, "column": cell.column, "error": cell.error, "tip": tip}


_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"
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
    largest = _worst_rows(found, _MOST_LINES)
    highest = max(largest.values(), default=0.0)
    if not highest:
        return []
    labels = {row: printable(label) for row, label in row_labels(found).items() if row in largest}
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

    heights: dict[tuple[str, int], float] = {}
    for cell in found:
        bar = 0 if cell.column is None else layers.index(cell.column) * bars // len(layers)
        heights[cell.row, bar] = max(heights.get((cell.row, bar), 0.0), cell.error)
    first = f" of layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else ""
    lines = [f"Relative rmse{first}, and the largest"[:width]]
    for row, label in labels.items():
        name = label if len(label) <= names else f"{cut}{label[1 - names :]}"
        plot = "".join(drawn(heights.get((row, bar))) for bar in range(bars))
        lines.append(f"{name:<{names}} {plot} {largest[row]:>{_FIGURE - 1}.3%}")
    return lines
