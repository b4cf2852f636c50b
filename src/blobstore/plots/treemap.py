"""A treemap: the bytes of a model by module, coloured by type.

A model of many tensors is drawn coarser, until there are few enough rectangles: first experts of a
layer together, then whole parts of a layer, then whole layers, and the smallest modules together.
Each rectangle is of one type, and the sum of all is the model's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from blobstore.plots.modules import modules_and_parts, natural, starred
from blobstore.plots.palette import colour_of, family_of_type, ink_of
from blobstore.plots.specification import (
    Specification,
    colour_scale,
    empty,
    specification,
    tip_of,
    type_legend,
)
from blobstore.plots.subjects import Weighed
from blobstore.views.quantities import counted, size

MOST_RECTANGLES = 1500
_MOST_LABELLED = 250
_HEIGHT = 480
_HEADER = 16
_LONGEST = 120
_ROWS = 200
_OTHERS = "other modules"


class Rectangle(NamedTuple):
    """The tensors of one type in one place: their number and bytes."""

    module: str
    part: str
    type_name: str
    tensors: int
    nbytes: int


_Row = tuple[str, str, str, int]
"""A tensor: its module, its name in there, its type, its bytes."""

_COARSENESS: tuple[Callable[[str], str], ...] = (
    lambda part: part,
    lambda part: starred("." + part)[1:],
    lambda part: part.partition(".")[0],
    lambda _: "",
)
"""From a tensor's name in its module to the part that is drawn, the finest first."""


def rectangles(tensors: Iterable[Weighed], most: int = MOST_RECTANGLES) -> list[Rectangle]:
    """Return at most ``most`` rectangles, whose bytes are those of all the tensors.

    They are sorted by module and part. Under the last coarseness, modules beyond the largest ones
    are one, ``other modules``.
    """
    listed = list(tensors)
    places = modules_and_parts([one.name for one in listed])
    rows = [
        (module, part, one.type_name, one.nbytes)
        for (module, part), one in zip(places, listed, strict=True)
    ]
    for coarser in _COARSENESS:
        if (found := _drawn(rows, coarser, most)) is not None:
            return sorted(found, key=natural)
    return _with_others(_drawn(rows, _COARSENESS[-1], len(rows)) or [], most)


def _drawn(rows: list[_Row], coarser: Callable[[str], str], most: int) -> list[Rectangle] | None:
    """Return the rectangles of one coarseness, unsorted; None if there are more than ``most``."""
    parts = {part: coarser(part) for part in {part for _, part, _, _ in rows}}  # few: layers repeat
    sums: dict[tuple[str, str, str], list[int]] = {}
    for module, part, type_name, nbytes in rows:
        place = (module, parts[part], type_name)
        if place in sums:
            found = sums[place]
            found[0] += 1
            found[1] += nbytes
        elif len(sums) < most:
            sums[place] = [1, nbytes]
        else:
            return None
    return [Rectangle(*place, number, total) for place, (number, total) in sums.items()]


def _with_others(found: list[Rectangle], most: int) -> list[Rectangle]:
    """Return the largest rectangles, and one of each type for all others."""
    types = len({one.type_name for one in found})
    order = sorted(found, key=lambda one: (-one.nbytes, one))
    kept, others = order[: max(0, most - types)], order[max(0, most - types) :]
    sums: dict[str, Rectangle] = {}
    for one in others:
        before = sums.get(one.type_name, Rectangle(_OTHERS, "", one.type_name, 0, 0))
        sums[one.type_name] = before._replace(
            tensors=before.tensors + one.tensors, nbytes=before.nbytes + one.nbytes
        )
    return sorted([*kept, *sums.values()], key=natural)


def treemap(tensors: Iterable[Weighed], most: int = MOST_RECTANGLES) -> Specification:
    """Return the treemap of a model's stored tensors, or of those that a plan would store.

    ``most``: rectangles, as for `rectangles`.
    """
    found = rectangles(tensors, most)
    total = sum(one.nbytes for one in found)
    number = sum(one.tensors for one in found)
    if not total:
        return empty("Bytes by module: there are none.", "There are no bytes to show.")
    modules = list(dict.fromkeys(one.module for one in found))
    labelled = len(modules) <= _MOST_LABELLED
    description = (
        f"Treemap: {size(total)} in {counted(number, 'tensor')} by module,"
        f" coloured by type. {_shares(found, total)}."
    )
    largest = sorted(found, key=lambda one: (-one.nbytes, one))[:_ROWS]
    return specification(
        description,
        height=_HEIGHT,
        columns=("module", "part", "type", "tensors", "size", "share"),
        rows=[(*one[:4], size(one.nbytes), f"{one.nbytes / total:.1%}") for one in largest],
        data=_data(found, total, modules, labelled=labelled),
        scales=[colour_scale(one.type_name for one in found)],
        legends=[type_legend()],
        marks=_marks(labelled=labelled),
    )


def _shares(found: list[Rectangle], total: int) -> str:
    sums: dict[str, int] = {}
    for one in found:
        sums[one.type_name] = sums.get(one.type_name, 0) + one.nbytes
    order = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {nbytes / total:.1%}" for name, nbytes in order)


def _data(
    found: list[Rectangle], total: int, modules: list[str], *, labelled: bool
) -> list[dict[str, Any]]:
    numbers = {module: index + 1 for index, module in enumerate(modules)}
    rows: list[dict[str, Any]] = [{"id": 0}]
    for module, number in numbers.items():
        words = module.split(".")
        row = {"id": number, "parent": 0, "name": ".".join(words[-2:]), "short": words[-1]}
        rows.append({key: _cut(value) for key, value in row.items()})
    for index, one in enumerate(found):
        name = one.part or one.module.rpartition(".")[2]
        place = f"{one.module}.{one.part}" if one.part else one.module
        rows.append(
            {
                "id": len(numbers) + 1 + index,
                "parent": numbers[one.module],
                "bytes": one.nbytes,
                "type": family_of_type(one.type_name),
                "ink": ink_of(colour_of(one.type_name)),
                "name": _cut(name),
                "short": _cut(name.rpartition(".")[2]),
                **({"place": place} if _is_found(place, one) else {}),
                "tip": tip_of(
                    _cut(place),
                    f"{one.type_name}, {counted(one.tensors, 'tensor')},"
                    f" {size(one.nbytes)} ({one.nbytes / total:.1%})",
                ),
            }
        )
    header = _HEADER if labelled else 0
    layout = {
        "type": "treemap",
        "field": "bytes",
        "sort": {"field": ["value", "data.id"], "order": ["descending", "ascending"]},
        "method": "squarify",
        "ratio": 1.4,
        "paddingInner": 1 if labelled else 0.5,
        "paddingTop": header,
        "paddingOuter": 0 if labelled else 1,
        "round": labelled,
        "size": [{"signal": "width"}, {"signal": f"height + {header}"}],
    }
    tree = {"name": "tree", "values": rows}
    tree["transform"] = [{"type": "stratify", "key": "id", "parentKey": "parent"}, layout]
    depths = {"modules": "datum.depth === 1", "tensors": "datum.depth === 2"}
    return [
        tree,
        *(
            {"name": name, "source": "tree", "transform": [{"type": "filter", "expr": test}]}
            for name, test in depths.items()
        ),
    ]


def _is_found(place: str, one: Rectangle) -> bool:
    """Return True if a page can list the tensors of a rectangle by its place."""
    return one.module != _OTHERS and len(place) <= _LONGEST and place.isprintable()


def _cut(value: Any) -> Any:
    return value if not isinstance(value, str) or len(value) <= _LONGEST else value[:_LONGEST] + "…"


def _marks(*, labelled: bool) -> list[dict[str, Any]]:
    """Return rectangles of tensors, their labels, and the headers of modules."""
    shift = -_HEADER if labelled else 0  # the whole model has no header
    edges = {
        "x": {"field": "x0"},
        "x2": {"field": "x1"},
        "y": {"field": "y0", "offset": shift},
        "y2": {"field": "y1", "offset": shift},
    }
    boxes = {
        "type": "rect",
        "from": {"data": "tensors"},
        "aria": False,
        "style": "tile",
        "encode": {
            "enter": {"fill": {"scale": "type", "field": "type"}},
            "update": {**edges, "tooltip": {"field": "tip"}},
        },
    }
    names = _labels("tensors", "tile-label", "datum.y1 - datum.y0 > 14", shift + 3)
    names["encode"]["enter"] = {"fill": {"field": "ink"}}
    names["clip"] = True  # the room for labels below the lowest tiles would be left empty
    headers = _labels("modules", "tile-header", "true", shift + 2)
    return [boxes, names, *([headers] if labelled else [])]


def _labels(data: str, style: str, fits: str, offset: int) -> dict[str, Any]:
    """Return the labels of tiles: a name if there is room, else its last word, else nothing."""
    room = "datum.x1 - datum.x0 - 6"
    text = (
        f"!({fits}) ? '' : length(datum.name) * 6.4 < {room} ? datum.name"
        f" : length(datum.short) * 6.4 < {room} ? datum.short : ''"
    )
    return {
        "type": "text",
        "from": {"data": data},
        "aria": False,
        "interactive": False,
        "style": style,
        "encode": {
            "update": {
                "x": {"field": "x0", "offset": 3},
                "y": {"field": "y0", "offset": offset},
                "baseline": {"value": "top"},
                "text": {"signal": text},
            }
        },
    }
