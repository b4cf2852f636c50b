"""Charts: error against size, the bytes that models share, the distribution of one tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from blobstore.inspection.quality import Histogram, ValueDistribution
from blobstore.plots.heatmap import TensorError, worst_first
from blobstore.plots.specification import (
    Specification,
    empty,
    family_of_type,
    specification,
    tip_of,
)
from blobstore.store.care.usage import ModelUsage
from blobstore.views.quantities import count, counted, size

MOST_POINTS = 1500
MOST_BARS = 40
_HEIGHT = 360
_ROWS = 100
_BAR = 22
_LOW, _WITH_CODES, _LEGEND = 250, 182, 30
"""Pixels of a histogram; what one of codes below it, and a legend, add."""
_MARKED = {"-448", "-16", "-1", "-0.0625", "0", "0.0625", "1", "16", "448"}
"""Numbers of E4M3 that its axis names."""


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
    found = sorted(models, key=lambda one: (one.nbytes, one.relative_rmse, one.name))
    if not found:
        return empty("Error against size: no model was measured.", "No model was measured.")
    front: list[ModelPoint] = []
    points, rows = [], []
    for one in found:
        is_better = not front or one.relative_rmse < front[-1].relative_rmse
        if is_better:
            front.append(one)
        error, nbytes = f"{one.relative_rmse:.3%}", size(one.nbytes)
        says = f"{nbytes}, relative rmse {error}"
        points.append(_point(one.nbytes, one.relative_rmse, one.type_name, one.name, says))
        rows.append((one.name, one.type_name, nbytes, error, "yes" if is_better else "no"))
    description = (
        f"Scatter plot: relative rmse of {counted(len(found), 'model')} against their size. No"
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


def shared(models: Iterable[ModelUsage]) -> Specification:
    """Return the unique and the shared bytes of each model, the largest first.

    Models beyond the forty largest are left out of the picture, those without sizes of the table
    too.
    """
    sizes = [
        (str(one.name), one.unique, one.shared)
        for one in models
        if one.unique is not None and one.shared is not None
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


def distribution(found: ValueDistribution) -> Specification:
    """Return the histograms of a tensor's values and, of a quantized one, of its codes."""
    if not sum(found.values.counts):
        return empty(_description(found), "No finite values to show.")
    low, high = found.values.low, found.values.high
    if low == high:
        low, high = low - 1, high + 1
    source, codes, values = found.source, found.codes or (), found.code_values or ()
    # By the numbers that codes stand for: NaN last, -0 before 0.
    order = sorted(
        range(len(values)), key=lambda code: (math.isnan(values[code]), values[code], -code)
    )
    data = {"stored": _bins(found.values, "stored")}
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
        _description(found),
        height=_LOW + (_WITH_CODES if codes else 0) + (_LEGEND if source else 0),
        table=(("from", "to", "stored", *(["source"] if source else [])), _rows(found)),
        data=data,
        domains={"value": [low, high]},
        signals=_code_axis(found, order),
    )
    if not codes:
        plot["marks"].pop()
    if source is None:
        del plot["legends"]
    return plot


def _code_axis(found: ValueDistribution, order: Sequence[int]) -> dict[str, Any]:
    """Return what the axis of codes says: the number of each place, and which it names."""
    values = found.code_values or ()
    labels = [f"{values[code]:g}" for code in order]
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
    counts = [one.counts for one in (found.values, found.source) if one is not None]
    bins = zip(pairwise(found.values.edges), zip_longest(*counts, fillvalue=0), strict=False)
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
