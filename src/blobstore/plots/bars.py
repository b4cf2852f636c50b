"""Bars: the bytes of models, those that only they need and those that they share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from blobstore.plots.specification import (
    NARROW,
    Specification,
    empty,
    size_labels,
    specification,
    tip_of,
)
from blobstore.plots.subjects import ModelBytes
from blobstore.views.quantities import counted, size

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
    return specification(
        description,
        height=_BAR * len(drawn) + 75,
        columns=("model", "only here", "shared", "size"),
        rows=[(one.name, size(one.unique), size(one.shared), size(one.nbytes)) for one in found],
        data=[{"name": "bars", "values": [row for one in drawn for row in _parts(one)]}],
        scales=[
            {
                "name": "model",
                "type": "band",
                "domain": {"data": "bars", "field": "model"},
                "range": "height",
                "paddingInner": 0.25,
            },
            {
                "name": "bytes",
                "type": "linear",
                "domain": {"data": "bars", "field": "end"},
                "range": "width",
                "zero": True,
            },
            {
                "name": "part",
                "type": "ordinal",
                "domain": ["only here", "shared"],
                "range": "pair",
            },
        ],
        axes=_axes(),
        legends=[
            {
                "orient": "top",
                "direction": "horizontal",
                "fill": "part",
                "symbolType": "square",
                "symbolStrokeWidth": 0,
            }
        ],
        marks=[_rectangles()],
    )


def _parts(one: ModelBytes) -> list[dict[str, Any]]:
    tip = tip_of(one.name, f"{size(one.unique)} only here, {size(one.shared)} shared")
    ends = {"only here": (0, one.unique), "shared": (one.unique, one.nbytes)}
    return [
        {"model": one.name, "part": part, "begin": begin, "end": end, "tip": tip}
        for part, (begin, end) in ends.items()
    ]


def _axes() -> list[dict[str, Any]]:
    below = {"orient": "bottom", "scale": "bytes", "title": "size", "grid": True}
    below |= {
        "tickCount": {"signal": "ceil(width / 110)"},
        "labelOverlap": True,
        "encode": size_labels(),
    }
    left = {"orient": "left", "scale": "model", "ticks": False, "domain": False, "labelPadding": 6}
    # The end of a name tells models apart.
    most = f"(width < {NARROW} ? 20 : 40)"
    text = f"length(datum.value) > {most} ? '…' + slice(datum.value, -{most}) : datum.value"
    return [below, left | {"encode": {"labels": {"update": {"text": {"signal": text}}}}}]


def _rectangles() -> dict[str, Any]:
    return {
        "type": "rect",
        "from": {"data": "bars"},
        "aria": False,
        "encode": {
            "update": {
                "x": {"scale": "bytes", "field": "begin"},
                "x2": {"scale": "bytes", "field": "end"},
                "y": {"scale": "model", "field": "model"},
                "height": {"scale": "model", "band": 1},
                "fill": {"scale": "part", "field": "part"},
                "tooltip": {"field": "tip"},
            }
        },
    }
