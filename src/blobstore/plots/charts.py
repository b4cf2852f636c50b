"""Charts: errors by layer, error against size, bytes that models share, values of one tensor.

The heat map has the error of each projection in each layer; on a terminal it is text. Layers are
columns, projections rows: the layer of ``model.layers.3.mlp.experts.7.up_proj`` is 3, its
projection ``model.layers.*.mlp.experts.*.up_proj``. A tensor outside the layers has a row of its
own. Tensors in one place (the experts of a layer) are drawn as the worst.
"""

from __future__ import annotations

import math
import os.path
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from blobstore.inspection.quality import Histogram, ValueDistribution
from blobstore.plots.specification import (
    Specification,
    empty,
    family_of_type,
    specification,
    tip_of,
)
from blobstore.plots.treemap import FIRST_NUMBER, LONGEST, WEIGHT, group_name
from blobstore.store.care.usage import ModelUsage
from blobstore.views.quantities import count, counted, natural, printable, size

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


class Cell(NamedTuple):
    """The worst of the tensors in one place; ``column`` is the layer, or None."""

    row: str
    column: int | None
    worst: TensorError
    tensors: int


def worst_first(tensors: Iterable[TensorError]) -> list[TensorError]:
    """Return the tensors that have an error, the largest first."""
    changed = (tensor for tensor in tensors if tensor.error and not tensor.kept)
    return sorted(changed, key=lambda one: (-one.error, one.name))


def layer_and_projection(name: str) -> tuple[int | None, str]:
    """Return a tensor's layer, None without one, and its name with a star for each number."""
    name = name.removesuffix(WEIGHT)
    match = FIRST_NUMBER.search(name)
    if match is None:
        return None, name
    return int(match[0]), f"{name[: match.start()]}*{group_name(name[match.end() :])}"


def cells(tensors: Iterable[TensorError]) -> list[Cell]:
    """Return the cells of all tensors that were measured and not kept, row by row.

    Rows of layers are first, in the order of their names; columns from left to right. Rows beyond
    the sixty worst are left out.
    """
    by_place: dict[tuple[int | None, str], Cell] = {}
    for one in tensors:
        if one.kept or one.relative_rmse is None:
            continue
        place = layer, row = layer_and_projection(one.name)
        before = by_place.get(place, Cell(row, layer, one, 0))
        worst = max(before.worst, one, key=lambda tensor: tensor.error)
        by_place[place] = Cell(row, layer, worst, before.tensors + 1)
    rows = _worst_rows(by_place.values(), MOST_ROWS)
    return sorted(
        (cell for cell in by_place.values() if cell.row in rows),
        key=lambda cell: (cell.column is None, natural(cell.row), cell.column or 0),
    )


def _worst_rows(items: Iterable[Cell], most: int) -> dict[str, float]:
    """Return the largest errors of the rows where they are largest."""
    errors = {
        cell.row: cell.worst.error for cell in sorted(items, key=lambda cell: cell.worst.error)
    }
    rows = sorted(errors, key=lambda row: (-errors[row], row))
    return {row: errors[row] for row in rows[:most]}


def row_labels(items: list[Cell]) -> dict[str, str]:
    """Return short names of the rows, which are all different."""
    labels: dict[str, str] = {}
    for is_alone in (False, True):
        rows = (cell.row for cell in items if (cell.column is None) == is_alone)
        labels |= _short_labels(list(dict.fromkeys(rows)))
    return labels if len(set(labels.values())) == len(labels) else {row: row for row in labels}


def _short_labels(names: list[str]) -> dict[str, str]:
    """Return short labels by name: without the leading words that all have in common.

    A label keeps at least one word, and at most 120 characters. One name shares nothing.
    """
    parents = [name.split(".")[:-1] for name in names]
    common = len(os.path.commonprefix(parents)) if len(names) > 1 else 0  # noqa: RUF071  # lists of words
    return {name: ".".join(name.split(".")[common:])[:LONGEST] for name in names}


def errors(tensors: Iterable[TensorError]) -> Specification:
    """Return the heat map of the relative rmse of tensors against their source."""
    listed = list(tensors)
    drawn_cells = cells(listed)
    kept = sum(one.kept for one in listed)
    same = f" {counted(kept, 'tensor')} stored unchanged." if kept else ""
    if not drawn_cells:
        return empty(f"Errors by layer: no tensor was changed.{same}", "No tensor was changed.")
    order = sorted(drawn_cells, key=lambda cell: (-cell.worst.error, cell.worst.name))
    low, high = order[-1].worst.error, order[0].worst.error
    description = (
        f"Heat map: relative rmse of each tensor, by layer and projection, from {low:.3%} to"
        f" {high:.3%} in {order[0].worst.name}.{same}"
    )
    labels = row_labels(drawn_cells)
    rows = [labels[row] for row in dict.fromkeys(cell.row for cell in drawn_cells)]
    columns = sorted({cell.column for cell in drawn_cells if cell.column is not None})
    drawn = [_cell_mark(cell, labels[cell.row]) for cell in drawn_cells]
    plot = specification(
        "heatmap",
        description,
        height=_CELL * len(rows) + 110,
        table=(
            ("tensor", "type", "relative rmse", "tensors"),
            [
                (cell.worst.name, cell.worst.type_name, f"{cell.worst.error:.3%}", cell.tensors)
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


def _cell_mark(cell: Cell, label: str) -> dict[str, Any]:
    more = f", the worst of {cell.tensors}" if cell.tensors > 1 else ""
    tip = tip_of(
        f"{cell.worst.name}{more}", f"{cell.worst.type_name}, relative rmse {cell.worst.error:.3%}"
    )
    return {"row": label, "column": cell.column, "error": cell.worst.error, "tip": tip}


_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"
# Of a terminal, by level: cyan, green, yellow, red.
_COLOURS = (36, 36, 32, 32, 33, 33, 31, 31)
_MOST_LINES = 30
_LEAST_BARS = 8
_FIGURE = 9
# Characters of a bar, if there are few layers.
_WIDEST = 4


def error_lines(
    tensors: Iterable[TensorError], width: int, *, ascii_only: bool, colours: bool
) -> list[str]:
    """Return the lines of the plot, each at most ``width`` characters wide; [] without an error.

    Bars grow from 0 to the largest relative rmse. If there are more layers than fit, a bar is the
    worst of several. Only the thirty worst projections are shown.
    """
    drawn_cells = cells(tensors)
    largest = _worst_rows(drawn_cells, _MOST_LINES)
    highest = max(largest.values(), default=0.0)
    if not highest:
        return []
    labels = {
        row: printable(label) for row, label in row_labels(drawn_cells).items() if row in largest
    }
    layers = sorted({cell.column for cell in drawn_cells if cell.column is not None})
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
    for cell in drawn_cells:
        bar = 0 if cell.column is None else layers.index(cell.column) * bars // len(layers)
        heights[cell.row, bar] = max(heights.get((cell.row, bar), 0.0), cell.worst.error)
    first = f" of layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else ""
    lines = [f"Relative rmse{first}, and the largest"[:width]]
    for row, label in labels.items():
        name = label if len(label) <= names else f"{cut}{label[1 - names :]}"
        plot = "".join(drawn(heights.get((row, bar))) for bar in range(bars))
        lines.append(f"{name:<{names}} {plot} {largest[row]:>{_FIGURE - 1}.3%}")
    return lines


MOST_POINTS = 1500
MOST_BARS = 40
_HEIGHT = 360
_ROWS = 100
_BAR = 22
_LOW, _WITH_CODES, _LEGEND = 250, 182, 30
"""Pixels of a histogram; what one of codes below it, and a legend, add."""
# Numbers of E4M3 that its axis names.
_MARKED = {"-448", "-16", "-1", "-0.0625", "0", "0.0625", "1", "16", "448"}


class ModelPoint(NamedTuple):
    """A model among others: its bytes, and its error against one source for all of them.

    ``type_name``: the type of most of its weights. ``relative_rmse``: of all its weights.
    """

    name: str
    type_name: str
    nbytes: int
    relative_rmse: float


def scatter(tensors: Iterable[TensorError]) -> Specification:
    """Return the relative rmse of changed tensors against the number of their weights.

    Tensors beyond the 1,500 worst are left out of the picture.
    """
    changed = worst_first(tensors)
    if not changed:
        return empty("Error against size: no tensor was changed.", "No tensor was changed.")
    worst, drawn = changed[0], changed[:MOST_POINTS]
    more = "" if len(drawn) == len(changed) else f" The {len(drawn):,} worst are drawn."
    description = (
        f"Scatter plot: relative rmse of {counted(len(changed), 'tensor')} against their weights;"
        f" the worst is {worst.name} with {worst.error:.3%}.{more}"
    )
    points, rows = [], []
    for one in drawn:
        error, weights = f"{one.error:.3%}", math.prod(one.shape)
        says = f"{one.type_name}, {count(weights)} weights, relative rmse {error}"
        points.append(_point(weights, one.error, one.type_name, one.name, says))
        rows.append((one.name, one.type_name, weights, error))
    return specification(
        "scatter",
        description,
        height=_HEIGHT,
        table=(("tensor", "type", "weights", "relative rmse"), rows[:_ROWS]),
        data={"points": points},
    )


def _point(x: float, y: float, type_name: str, name: str, says: str) -> dict[str, Any]:
    tip = tip_of(name, says)
    return {"x": x, "y": y, "type": family_of_type(type_name), "name": name, "tip": tip}


def frontier(models: Iterable[ModelPoint]) -> Specification:
    """Return the relative rmse of models against their bytes, with the Pareto front marked.

    A model is on the front if no other is both smaller and better.
    """
    ordered = sorted(models, key=lambda one: (one.nbytes, one.relative_rmse, one.name))
    if not ordered:
        return empty("Error against size: no model was measured.", "No model was measured.")
    front: list[ModelPoint] = []
    points, rows = [], []
    for one in ordered:
        is_better = not front or one.relative_rmse < front[-1].relative_rmse
        if is_better:
            front.append(one)
        error, nbytes = f"{one.relative_rmse:.3%}", size(one.nbytes)
        says = f"{nbytes}, relative rmse {error}"
        points.append(_point(one.nbytes, one.relative_rmse, one.type_name, one.name, says))
        rows.append((one.name, one.type_name, nbytes, error, "yes" if is_better else "no"))
    description = (
        f"Scatter plot: relative rmse of {counted(len(ordered), 'model')} against their size. No"
        " model is both smaller and better than one of these: "
        f"{', '.join(one.name for one in front)}."
    )
    return specification(
        "frontier",
        description,
        height=_HEIGHT,
        table=(("model", "type", "size", "relative rmse", "on the front"), rows),
        data={
            "points": points,
            "front": [{"x": one.nbytes, "y": one.relative_rmse} for one in front],
        },
    )


def unique_and_shared(models: Iterable[ModelUsage]) -> Specification:
    """Return the unique and the shared bytes of each model, the largest first.

    Models beyond the forty largest are left out of the picture, those without sizes of the table
    too.
    """
    sizes = [
        (str(model.name), model.unique, model.shared)
        for model in models
        if model.unique is not None and model.shared is not None
    ]
    sizes.sort(key=lambda one: (-one[1] - one[2], one[0]))
    if not sizes or not any(sizes[0][1:]):
        return empty("Bytes of models: no models to show.", "No models to show.")
    drawn = sizes[:MOST_BARS]
    more = "" if len(drawn) == len(sizes) else f" The {len(drawn)} largest are drawn."
    description = (
        f"Bars: bytes of {counted(len(sizes), 'model')}, those that only the model needs and those"
        f" that others need too. The largest is {sizes[0][0]} with {size(sum(sizes[0][1:]))}.{more}"
    )
    parts = []
    for name, own, others in drawn:
        tip = tip_of(name, f"{size(own)} only here, {size(others)} shared")
        ends = {"only here": (0, own), "shared": (own, own + others)}
        parts += [
            {"model": name, "part": part, "begin": begin, "end": end, "tip": tip}
            for part, (begin, end) in ends.items()
        ]
    rows = [(name, size(own), size(others), size(own + others)) for name, own, others in sizes]
    return specification(
        "bars",
        description,
        height=_BAR * len(drawn) + 75,
        table=(("model", "only here", "shared", "size"), rows),
        data={"bars": parts},
    )


def distribution(given: ValueDistribution) -> Specification:
    """Return the histograms of a tensor's values and, of a quantized one, of its codes."""
    if not sum(given.values.counts):
        return empty(_description(given), "No finite values to show.")
    low, high = given.values.low, given.values.high
    if low == high:
        low, high = low - 1, high + 1
    source, codes, values = given.source, given.codes or (), given.code_values or ()
    # By the numbers that codes stand for: NaN last, -0 before 0.
    order = sorted(
        range(len(values)), key=lambda code: (math.isnan(values[code]), values[code], -code)
    )
    data = {"stored": _bins(given.values, "stored")}
    data["codes"] = [
        {
            "place": place,
            "share": codes[code] / max(1, sum(codes)),
            "tip": tip_of(f"code {code}, {_number(values[code])}", f"{codes[code]:,} times"),
        }
        for place, code in enumerate(order)
    ]
    if source is not None and (bins := _bins(source, "source")):
        # A line of steps ends at the last edge.
        data["source"] = [*bins, {**bins[-1], "low": bins[-1]["high"]}]
    plot = specification(
        "histograms",
        _description(given),
        height=_LOW + (_WITH_CODES if codes else 0) + (_LEGEND if source else 0),
        table=(("from", "to", "stored", *(["source"] if source else [])), _rows(given)),
        data=data,
        domains={"value": [low, high]},
        signals=_code_axis(given, order),
    )
    if not codes:
        plot["marks"].pop()
    if source is None:
        del plot["legends"]
    return plot


def _code_axis(of: ValueDistribution, order: Sequence[int]) -> dict[str, Any]:
    """Return what the axis of codes says: the number of each place, and which it names."""
    values = of.code_values or ()
    labels = [f"{values[code]:g}" for code in order]
    marked = list(range(0, len(order), max(1, len(order) // 8)))
    if of.type_name.startswith("mxfp8"):
        marked = [place for place, label in enumerate(labels) if label in _MARKED]
    return {"labels": labels, "marked": marked, "affine": of.type_name.startswith("int")}


def _description(of: ValueDistribution) -> str:
    values = of.values
    has_odd, codes = values.infinite or values.nan, of.codes
    odd = f", {values.infinite:,} infinite and {values.nan:,} NaN" if has_odd else ""
    read = f"a sample of {of.read:,} of " if of.is_sample else ""
    used = "" if codes is None else f" {sum(map(bool, codes))} of {len(codes)} codes occur."
    return (
        f"Histogram of {of.name} ({of.type_name}): {read}{of.size:,} values"
        f" between {values.low:.4g} and {values.high:.4g}, root mean square"
        f" {values.rms:.4g}{odd}.{used}"
    )


def _rows(of: ValueDistribution) -> list[tuple[Any, ...]]:
    counts = [one.counts for one in (of.values, of.source) if one is not None]
    bins = zip(pairwise(of.values.edges), zip_longest(*counts, fillvalue=0), strict=False)
    return [(f"{low:.4g}", f"{high:.4g}", *numbers) for (low, high), numbers in bins]


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"stands for {value:g}"


def _bins(histogram: Histogram, of: str) -> list[dict[str, Any]]:
    edges, total = histogram.edges, max(1, sum(histogram.counts))
    return [
        {
            "low": low,
            "high": high,
            "share": number / total,
            "tip": tip_of(f"{low:.4g} to {high:.4g}", f"{of}: {number:,} values"),
        }
        for low, high, number in zip(edges, edges[1:], histogram.counts, strict=False)
    ]
