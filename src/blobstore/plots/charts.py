"""Error against size: of the tensors of one model, and of several models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from blobstore.inspection.quality import Histogram, ValueDistribution
from blobstore.plots.specification import (
    ModelBytes,
    ModelPoint,
    Specification,
    TensorError,
    coloured,
    empty,
    family_of_type,
    specification,
    tip_of,
)
from blobstore.views.quantities import count, counted, size

MOST_POINTS = 1500
_HEIGHT = 360
_ROWS = 100


def scatter(tensors: Iterable[TensorError]) -> Specification:
    """Return the relative rmse of changed tensors against the number of their weights.

    Tensors beyond the 1,500 worst are left out of the picture.
    """
    changed = [one for one in tensors if not one.kept and one.relative_rmse and one.weights]
    if not changed:
        return empty("Error against size: no tensor was changed.", "No tensor was changed.")
    changed.sort(key=lambda one: (-(one.relative_rmse or 0), one.name))
    worst, drawn = changed[0], changed[:MOST_POINTS]
    more = "" if len(drawn) == len(changed) else f" The {len(drawn):,} worst are drawn."
    description = (
        f"Scatter plot: relative rmse of {counted(len(changed), 'tensor')} against their weights;"
        f" the worst is {worst.name} with {worst.relative_rmse or 0:.3%}.{more}"
    )
    points, rows = [], []
    for one in drawn:
        error = f"{one.relative_rmse or 0:.3%}"
        says = f"{one.type_name}, {count(one.weights)} weights, relative rmse {error}"
        points.append(
            {
                "x": one.weights,
                "y": one.relative_rmse or 0.0,
                "type": family_of_type(one.type_name),
                "tip": tip_of(one.name, says),
            }
        )
        rows.append((one.name, one.type_name, one.weights, error))
    columns = ("tensor", "type", "weights", "relative rmse")
    plot = specification(
        "scatter",
        description,
        height=_HEIGHT,
        table=(columns, rows[:_ROWS]),
        data={"points": points},
    )
    return coloured(plot, (one.type_name for one in drawn))


def frontier(models: Iterable[ModelPoint]) -> Specification:
    """Return the relative rmse of models against their bytes, with the Pareto front marked.

    A model is on the front if no other is both smaller and better.
    """
    found = sorted(models, key=lambda one: (one.nbytes, one.relative_rmse, one.name))
    if not found:
        return empty("Error against size: no model was measured.", "No model was measured.")
    front = _front(found)
    description = (
        f"Scatter plot: relative rmse of {counted(len(found), 'model')} against their size. No"
        " model is both smaller and better than one of these: "
        + ", ".join(one.name for one in front)
        + "."
    )
    points, rows = [], []
    for one in found:
        error, nbytes = f"{one.relative_rmse:.3%}", size(one.nbytes)
        points.append(
            {
                "x": one.nbytes,
                "y": one.relative_rmse,
                "type": family_of_type(one.type_name),
                "name": one.name,
                "tip": tip_of(one.name, f"{nbytes}, relative rmse {error}"),
            }
        )
        rows.append((one.name, one.type_name, nbytes, error, "yes" if one in front else "no"))
    plot = specification(
        "frontier",
        description,
        height=_HEIGHT,
        table=(("model", "type", "size", "relative rmse", "on the front"), rows),
        data={
            "points": points,
            "front": [{"x": one.nbytes, "y": one.relative_rmse} for one in front],
        },
    )
    return coloured(plot, (one.type_name for one in found))


def _front(found: Sequence[ModelPoint]) -> list[ModelPoint]:
    """Return the models of the front, of models by size: each is better than all smaller ones."""
    front: list[ModelPoint] = []
    for one in found:
        if not front or one.relative_rmse < front[-1].relative_rmse:
            front.append(one)
    return front


MOST_BARS = 40
_BAR = 22


def shared(models: Iterable[ModelBytes]) -> Specification:
    """Return the unique and the shared bytes of each model, the largest first.

    Models beyond the forty largest are left out of the picture.
    """
    found = sorted(models, key=lambda one: (-one.nbytes, one.name))
    if not found or not found[0].nbytes:
        return empty("Bytes of models: there are none.", "There are no models to show.")
    drawn = found[:MOST_BARS]
    more = "" if len(drawn) == len(found) else f" The {len(drawn)} largest are drawn."
    description = (
        f"Bars: bytes of {counted(len(found), 'model')}, those that only the model needs and those"
        f" that others need too. The largest is {found[0].name} with {size(found[0].nbytes)}.{more}"
    )
    parts = []
    for one in drawn:
        tip = tip_of(one.name, f"{size(one.unique)} only here, {size(one.shared)} shared")
        ends = {"only here": (0, one.unique), "shared": (one.unique, one.nbytes)}
        parts += [
            {"model": one.name, "part": part, "begin": begin, "end": end, "tip": tip}
            for part, (begin, end) in ends.items()
        ]
    rows = [(one.name, size(one.unique), size(one.shared), size(one.nbytes)) for one in found]
    return specification(
        "bars",
        description,
        height=_BAR * len(drawn) + 75,
        table=(("model", "only here", "shared", "size"), rows),
        data={"bars": parts},
    )


_LOW, _WITH_CODES, _LEGEND = 250, 182, 30
"""Pixels of a histogram; what one of codes below it, and a legend, add."""
_MARKED = {"-448", "-16", "-1", "-0.0625", "0", "0.0625", "1", "16", "448"}
"""Numbers of E4M3 that its axis names."""


def distribution(found: ValueDistribution) -> Specification:
    """Return the histograms of a tensor's values and, of a quantized one, of its codes."""
    if not sum(found.values.counts):
        return empty(_description(found), "There are no finite values to show.")
    low, high = found.values.low, found.values.high
    if low == high:
        low, high = low - 1, high + 1
    source, codes = found.source, found.codes
    values = found.code_values or ()
    order = _order(values)
    data = {"stored": _bins(found.values, "stored")}
    if source is not None and (bins := _bins(source, "source")):
        # A line of steps ends at the last edge.
        data["source"] = [*bins, {**bins[-1], "low": bins[-1]["high"]}]
    if codes is not None:
        total = max(1, sum(codes))
        data["codes"] = [
            {
                "place": place,
                "share": codes[code] / total,
                "tip": tip_of(f"code {code}, {_number(values[code])}", f"{codes[code]:,} times"),
            }
            for place, code in enumerate(order)
        ]
    height = _LOW + (_WITH_CODES if codes else 0) + (_LEGEND if source else 0)
    plot = specification(
        "histograms",
        _description(found),
        height=height,
        table=(("from", "to", "stored", *(["source"] if source else [])), _rows(found)),
        data=data,
        domains={"value": [low, high]},
        signals=_code_axis(found, order),
    )
    if codes is None:
        plot["marks"].pop()
    if source is None:
        del plot["legends"]
    return plot


def _code_axis(found: ValueDistribution, order: Sequence[int]) -> dict[str, Any]:
    """Return what the axis of codes says: the number of each place, and which it names."""
    values = found.code_values or ()
    labels = [f"{values[code]:g}" if values[code] or code == 0 else "-0" for code in order]
    marked = list(range(0, len(order), max(1, len(order) // 8)))
    if found.type_name.startswith("mxfp8"):
        marked = [place for place, label in enumerate(labels) if label in _MARKED]
    return {"labels": labels, "marked": marked, "affine": found.type_name.startswith("int")}


def _description(found: ValueDistribution) -> str:
    values = found.values
    odd = read = used = ""
    if values.infinite or values.nan:
        odd = f", {values.infinite:,} infinite and {values.nan:,} NaN"
    if found.is_sample:
        read = f"a sample of {found.read:,} of "
    if found.codes is not None:
        used = f" {sum(map(bool, found.codes))} of {len(found.codes)} codes occur."
    return (
        f"Histogram of {found.name} ({found.type_name}): {read}{found.size:,} values"
        f" between {values.low:.4g} and {values.high:.4g}, root mean square"
        f" {values.rms:.4g}{odd}.{used}"
    )


def _rows(found: ValueDistribution) -> list[tuple[Any, ...]]:
    edges, counts = found.values.edges, [found.values.counts]
    if found.source is not None:
        counts.append(found.source.counts)
    padded = [[*some, *[0] * (len(edges) - 1 - len(some))] for some in counts]
    return [
        (f"{low:.4g}", f"{high:.4g}", *numbers)
        for low, high, *numbers in zip(edges, edges[1:], *padded, strict=False)
    ]


def _order(values: Sequence[float]) -> list[int]:
    """Return codes by the numbers that they stand for: NaN last, -0 before 0."""
    codes = range(len(values))
    return sorted(codes, key=lambda code: (math.isnan(values[code]), values[code], -code))


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
