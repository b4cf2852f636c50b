"""Error against size: of the tensors of one model, and of several models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blobstore.plots.palette import family_of_type
from blobstore.plots.specification import Specification, coloured, empty, specification, tip_of
from blobstore.plots.subjects import ModelPoint, TensorError
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
