"""The distribution of one tensor: its values beside those of its source, and its codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from blobstore.inspection.distributions import Histogram, ValueDistribution
from blobstore.plots.specification import NARROW, Specification, empty, specification, tip_of

_VALUES, _GAP, _CODES = 190, 62, 120
_LEGEND = 90
_MARKED = {"-448", "-16", "-1", "-0.0625", "0", "0.0625", "1", "16", "448"}
"""Numbers of E4M3 that its axis names."""


def distribution(found: ValueDistribution) -> Specification:
    """Return the histograms of a tensor's values and, of a quantized one, of its codes."""
    if not sum(found.values.counts):
        return empty(_description(found), "There are no finite values to show.")
    marks = [_values(found)]
    if found.codes is not None:
        marks.append(_codes(found))
    compared = found.source is not None
    return specification(
        _description(found),
        height=_VALUES
        + (0 if found.codes is None else _GAP + _CODES)
        + (_LEGEND if compared else 60),
        columns=("from", "to", "stored", *(["source"] if compared else [])),
        rows=_rows(found),
        data=_data(found),
        scales=_scales(found),
        **({"legends": [_legend()]} if compared else {}),
        marks=marks,
    )


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


def _finite(histogram: Histogram) -> int:
    return sum(histogram.counts)


def _rows(found: ValueDistribution) -> list[tuple[Any, ...]]:
    edges, counts = found.values.edges, [found.values.counts]
    if found.source is not None:
        counts.append(found.source.counts)
    padded = [[*some, *[0] * (len(edges) - 1 - len(some))] for some in counts]
    return [
        (f"{low:.4g}", f"{high:.4g}", *numbers)
        for low, high, *numbers in zip(edges, edges[1:], *padded, strict=False)
    ]


def _data(found: ValueDistribution) -> list[dict[str, Any]]:
    tables = [{"name": "stored", "values": _bins(found.values, "stored")}]
    if found.source is not None:
        # A line of steps ends at the last edge.
        bins = _bins(found.source, "source")
        ends = [{**bins[-1], "low": bins[-1]["high"]}] if bins else []
        tables.append({"name": "source", "values": bins + ends})
    if found.codes is not None:
        values = found.code_values or ()
        order = _order(values)
        total = max(1, sum(found.codes))
        rows = [
            {
                "place": place,
                "share": found.codes[code] / total,
                "tip": tip_of(
                    f"code {code}, {_number(values[code])}", f"{found.codes[code]:,} times"
                ),
            }
            for place, code in enumerate(order)
        ]
        tables.append({"name": "codes", "values": rows})
    return tables


def _order(values: Sequence[float]) -> list[int]:
    """Return codes by the numbers that they stand for: NaN last, -0 before 0."""
    codes = range(len(values))
    return sorted(codes, key=lambda code: (math.isnan(values[code]), values[code], -code))


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"stands for {value:g}"


def _bins(histogram: Histogram, of: str) -> list[dict[str, Any]]:
    edges, total = histogram.edges, max(1, _finite(histogram))
    return [
        {
            "low": low,
            "high": high,
            "share": number / total,
            "tip": tip_of(f"{low:.4g} to {high:.4g}", f"{of}: {number:,} values"),
        }
        for low, high, number in zip(edges, edges[1:], histogram.counts, strict=False)
    ]


def _scales(found: ValueDistribution) -> list[dict[str, Any]]:
    low, high = found.values.low, found.values.high
    if low == high:
        low, high = low - 1, high + 1
    tables = ["stored"] if found.source is None else ["stored", "source"]
    shares = [{"data": table, "field": "share"} for table in tables]
    value = {"name": "value", "type": "linear", "domain": [low, high], "range": "width"}
    share: dict[str, Any] = {"name": "share", "type": "linear", "zero": True, "nice": True}
    share |= {"domain": {"fields": shares}, "range": [_VALUES, 0]}
    scales: list[dict[str, Any]] = [value | {"zero": False}, share]
    if found.codes is not None:
        places = {"data": "codes", "field": "place"}
        code = {"name": "code", "type": "band", "domain": places, "range": "width"}
        uses = {"data": "codes", "field": "share"}
        use = {"name": "use", "type": "linear", "domain": uses, "zero": True, "nice": True}
        scales += [code | {"paddingInner": 0.1}, use | {"range": [_CODES, 0]}]
    of = {"name": "of", "type": "ordinal", "domain": ["stored", "source"], "range": "pair"}
    return [*scales, of]


def _values(found: ValueDistribution) -> dict[str, Any]:
    bars = {
        "type": "rect",
        "from": {"data": "stored"},
        "aria": False,
        "encode": {
            "update": {
                "x": {
                    "signal": "scale('value', datum.low) + (datum.low === datum.high ? -2 : 0.5)"
                },
                "x2": {"signal": "scale('value', datum.high) + (datum.low === datum.high ? 2 : 0)"},
                "y": {"scale": "share", "field": "share"},
                "y2": {"scale": "share", "value": 0},
                "fill": {"scale": "of", "value": "stored"},
                "tooltip": {"field": "tip"},
            }
        },
    }
    line = {
        "type": "line",
        "from": {"data": "source"},
        "aria": False,
        "interactive": False,
        "encode": {
            "update": {
                "x": {"scale": "value", "field": "low"},
                "y": {"scale": "share", "field": "share"},
                "interpolate": {"value": "step-after"},
                "stroke": {"scale": "of", "value": "source"},
                "strokeWidth": {"value": 1.5},
            }
        },
    }
    return _panel(
        0,
        _VALUES,
        [_axis("bottom", "value", "value"), _axis("left", "share", "share of values")],
        [bars] if found.source is None else [bars, line],
    )


def _codes(found: ValueDistribution) -> dict[str, Any]:
    is_affine = found.type_name.startswith("int")
    title: str | dict[str, str] = "code"
    if not is_affine:
        long, short = "code, as the number that it stands for before scaling", "code, as a number"
        title = {"signal": f"width < {NARROW} ? '{short}' : '{long}'"}
    number = len(found.codes or ())
    values = found.code_values or ()
    places = _order(values)
    labels = [f"{values[code]:g}" if values[code] or code == 0 else "-0" for code in places]
    axis = _axis("bottom", "code", title)
    marked = [place for place, label in enumerate(labels) if label in _MARKED]
    evenly = list(range(0, number, max(1, number // 8)))
    axis["values"] = marked if found.type_name.startswith("mxfp8") else evenly
    axis["encode"] = {"labels": {"update": {"text": {"signal": f"{labels!r}[datum.value]"}}}}
    bars = {
        "type": "rect",
        "from": {"data": "codes"},
        "aria": False,
        "encode": {
            "update": {
                "x": {"scale": "code", "field": "place"},
                "width": {"scale": "code", "band": 1},
                "y": {"scale": "use", "field": "share"},
                "y2": {"scale": "use", "value": 0},
                "fill": {"scale": "of", "value": "stored"},
                "tooltip": {"field": "tip"},
            }
        },
    }
    return _panel(_VALUES + _GAP, _CODES, [axis, _axis("left", "use", "share of codes")], [bars])


def _axis(orient: str, scale: str, title: str | dict[str, str]) -> dict[str, Any]:
    axis = {"orient": orient, "scale": scale, "title": title, "labelOverlap": True}
    if orient == "left":
        return axis | {
            "tickCount": 4,
            "grid": True,
            "domain": False,
            "ticks": False,
            "format": "~%",
        }
    return axis | {"labelFlush": True, "tickCount": {"signal": "ceil(width / 110)"}}


def _panel(
    y: int, height: int, axes: list[dict[str, Any]], marks: list[dict[str, Any]]
) -> dict[str, Any]:
    size = {
        "y": {"value": y},
        "width": {"signal": "width"},
        "height": {"value": height},
    }
    return {"type": "group", "encode": {"update": size}, "axes": axes, "marks": marks}


def _legend() -> dict[str, Any]:
    return {
        "orient": "top",
        "direction": "horizontal",
        "fill": "of",
        "symbolType": "square",
        "symbolStrokeWidth": 0,
    }
