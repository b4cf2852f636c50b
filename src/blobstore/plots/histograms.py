"""The distribution of one tensor: its values beside those of its source, and its codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from blobstore.inspection.distributions import Histogram, ValueDistribution
from blobstore.plots.specification import Specification, empty, specification, tip_of

_HEIGHT, _WITH_CODES, _LEGEND = 250, 182, 30
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
    height = _HEIGHT + (_WITH_CODES if codes else 0) + (_LEGEND if source else 0)
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
