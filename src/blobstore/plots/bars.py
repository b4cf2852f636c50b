"""Bars: the bytes of models, those that only they need and those that they share."""

from __future__ import annotations

from collections.abc import Iterable

from blobstore.plots.specification import Specification, empty, specification, tip_of
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
