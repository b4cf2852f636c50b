"""Error against size: of the tensors of one model, and of several models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from blobstore.plots.palette import family_of_type
from blobstore.plots.specification import Specification, coloured, empty, specification, tip_of
from blobstore.plots.subjects import ModelPoint, TensorError
from blobstore.views.quantities import count, counted, size

MOST_POINTS = 1500
_GRIDS = (48, 24, 12, 8)
_HEIGHT = 360
_HEAD, _FOOT = 16, 18
"""Pixels above the largest error and below an error of 0, in which a name can be written."""
_ROWS = 100
_LETTER, _LINE = 6.6, 15.0


class Dot(NamedTuple):
    """Tensors of one type that are drawn as one point: the worst of them, and their number."""

    worst: TensorError
    tensors: int


def dots(tensors: Iterable[TensorError], most: int = MOST_POINTS) -> list[Dot]:
    """Return the points of all tensors that were changed, the worst first.

    If they are more than ``most``, those of one type that are near to each other are one.
    """
    changed = [one for one in tensors if not one.kept and one.relative_rmse and one.weights]
    changed.sort(key=lambda one: (-(one.relative_rmse or 0), one.name))
    found = [Dot(one, 1) for one in changed]
    for steps in _GRIDS:
        if len(found) > most:
            found = _near(changed, steps)
    return found


def _near(changed: list[TensorError], steps: int) -> list[Dot]:
    """Return a point for each place of a grid: powers of the weights, steps of the error."""
    highest = math.log(max(one.weights for one in changed)) or 1.0
    worst = changed[0].relative_rmse or 1.0
    places: dict[tuple[str, int, int], Dot] = {}
    for one in changed:
        across = int(math.log(one.weights) / highest * steps)
        up = int((one.relative_rmse or 0) / worst * steps)
        place = (family_of_type(one.type_name), across, up)
        before = places.get(place, Dot(one, 0))
        places[place] = before._replace(tensors=before.tensors + 1)
    return list(places.values())


def scatter(tensors: Iterable[TensorError]) -> Specification:
    """Return the relative rmse of each changed tensor against the number of its weights."""
    found = dots(tensors)
    if not found:
        return empty("Error against size: no tensor was changed.", "No tensor was changed.")
    number = sum(dot.tensors for dot in found)
    worst = found[0].worst
    description = (
        f"Scatter plot: relative rmse of {counted(number, 'tensor')} against their weights; the"
        f" worst is {worst.name} with {worst.relative_rmse or 0:.3%}."
    )
    points, rows = [], []
    for one, tensors_here in found:
        error = f"{one.relative_rmse or 0:.3%}"
        more = f", the worst of {tensors_here:,} near it" if tensors_here > 1 else ""
        says = f"{one.type_name}, {count(one.weights)} weights, relative rmse {error}"
        points.append(
            {
                "x": one.weights,
                "y": one.relative_rmse or 0.0,
                "type": family_of_type(one.type_name),
                "tensors": tensors_here,
                "tip": tip_of(f"{one.name}{more}", says),
            }
        )
        rows.append((one.name, one.type_name, one.weights, error, tensors_here))
    columns = ("tensor", "type", "weights", "relative rmse", "tensors")
    plot = specification(
        "scatter",
        description,
        height=_HEIGHT,
        table=(columns, rows[:_ROWS]),
        data={"points": points},
    )
    return coloured(plot, (dot.worst.type_name for dot in found))


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
    for one, wide, narrow in zip(found, _labels(found, 800), _labels(found, 280), strict=True):
        error, nbytes = f"{one.relative_rmse:.3%}", size(one.nbytes)
        points.append(
            {
                "x": one.nbytes,
                "y": one.relative_rmse,
                "type": family_of_type(one.type_name),
                "wide": wide,
                "narrow": narrow,
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


def _labels(found: Sequence[ModelPoint], width: int) -> list[str]:
    """Return where each name is written in a plot of that width: '' where there is no room.

    A name keeps away from the edges, from all points and from the names before it.
    """
    left, right = found[0].nbytes, max(one.nbytes for one in found)
    top = max(one.relative_rmse for one in found) or 1.0
    points = [
        (
            12 + (one.nbytes - left) / max(1, right - left) * (width - 24),
            _HEAD + (1 - one.relative_rmse / top) * (_HEIGHT - 110 - _HEAD - _FOOT),
        )
        for one in found
    ]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    places = []
    for index, one in enumerate(found):
        x, y = points[index]
        length = len(one.name) * _LETTER
        # The front is a line to the right and down: names keep out of its way.
        boxes = {
            "left": (x - 6 - length, y, x - 6, y + _LINE),
            "right": (x + 6, y - _LINE, x + 6 + length, y),
            "below": (x - length / 2, y + 7, x + length / 2, y + 7 + _LINE),
        }
        place = next(
            (
                word
                for word, box in boxes.items()
                if box[0] >= 0
                and box[2] <= width
                and box[3] <= _HEIGHT - 110
                and not any(_overlap(box, other) for i, other in enumerate(taken) if i != index)
            ),
            "",
        )
        places.append(place)
        if place:
            taken.append(boxes[place])
    return places


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
