"""A treemap: the bytes of a model by module, coloured by type.

A model of many tensors is drawn coarser, until there are few enough rectangles: first experts of a
layer together, then whole parts of a layer, then whole layers, and then all layers.
Each rectangle is of one type, and the sum of all is the model's bytes.

Names of tensors are places: ``model.layers.3.mlp.experts.7.up_proj.weight`` is in module
``model.layers.3``.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from blobstore.plots.specification import (
    Specification,
    empty,
    family_of_type,
    specification,
    tip_of,
)
from blobstore.views.quantities import counted, cut_text, natural, size

FIRST_NUMBER = re.compile(r"(?:^|(?<=\.))[0-9]{1,9}(?=\.|\Z)", re.ASCII)
_NUMBER = re.compile(r"(?<=\.)[0-9]{1,9}(?=\.|$)", re.ASCII)
WEIGHT = ".weight"
LONGEST = 120
MOST_RECTANGLES = 1500
_MOST_LABELLED = 250
_HEIGHT = 480
_HEADER = 16
_ROWS = 200
_ALL = "all modules"


class Rectangle(NamedTuple):
    """The tensors of one type in one place: their number and bytes."""

    module: str
    part: str
    type_name: str
    tensors: int
    nbytes: int


def module_and_part(name: str) -> tuple[str, str]:
    """Return the module that a tensor is drawn in, and its name in there.

    The module ends at the first number, else before the tensor's own word.
    """
    name = name.removesuffix(WEIGHT)
    match = FIRST_NUMBER.search(name)
    if match:
        return name[: match.end()], name[match.end() + 1 :]
    module, _, last = name.rpartition(".")
    return (module, last) if module else (name, "")


def group_name(name: str) -> str:
    """Return a name with a star for each part that is a number."""
    return _NUMBER.sub("*", name)


# From a tensor's name in its module to the part that is drawn, the finest first.
_COARSENESS: tuple[Callable[[str], str], ...] = (
    lambda part: part,
    lambda part: group_name("." + part)[1:],
    lambda part: part.partition(".")[0],
    lambda _: "",
)


def rectangles(
    tensors: Iterable[tuple[str, str, int]], most: int = MOST_RECTANGLES
) -> list[Rectangle]:
    """Return at most ``most`` rectangles, whose bytes are those of all the tensors.

    They are sorted by module and part. If there are more modules than that, all are one,
    ``all modules``.
    """
    rows = [(*module_and_part(name), kind, nbytes) for name, kind, nbytes in tensors]
    for coarser in _COARSENESS:
        parts = {part: coarser(part) for part in {row[1] for row in rows}}  # few: layers repeat
        sums = _sums((module, parts[part], kind, nbytes) for module, part, kind, nbytes in rows)
        if len(sums) <= most:
            break
    else:
        sums = _sums((_ALL, "", kind, nbytes) for _, _, kind, nbytes in rows)
    return sorted(sums, key=lambda place: [natural(str(part)) for part in place])


def _sums(rows: Iterable[tuple[str, str, str, int]]) -> list[Rectangle]:
    sizes: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    for module, part, kind, nbytes in rows:
        sizes[module, part, kind].append(nbytes)
    return [Rectangle(*place, len(some), sum(some)) for place, some in sizes.items()]


def treemap(tensors: Iterable[tuple[str, str, int]], most: int = MOST_RECTANGLES) -> Specification:
    """Return the treemap of a model's stored tensors, or of those that a plan would store.

    ``tensors``: names, types in words (``int4/64``) and bytes. ``most``: rectangles, as for
    `rectangles`.
    """
    drawn = rectangles(tensors, most)
    total = sum(one.nbytes for one in drawn)
    number = sum(one.tensors for one in drawn)
    if not total:
        return empty("Bytes by module: no bytes to show.", "No bytes to show.")
    modules = list(dict.fromkeys(one.module for one in drawn))
    description = (
        f"Treemap: {size(total)} in {counted(number, 'tensor')} by module,"
        f" coloured by type. {_shares(drawn, total)}."
    )
    largest = sorted(drawn, key=lambda one: (-one.nbytes, one))[:_ROWS]
    return specification(
        "treemap",
        description,
        height=_HEIGHT,
        table=(
            ("module", "part", "type", "tensors", "size", "share"),
            [(*one[:4], size(one.nbytes), f"{one.nbytes / total:.1%}") for one in largest],
        ),
        data={"tree": _tree(drawn, total, modules)},
        signals={"header": _HEADER if len(modules) <= _MOST_LABELLED else 0},
    )


def _shares(rows: list[Rectangle], total: int) -> str:
    sums: Counter[str] = Counter()
    for one in rows:
        sums[one.type_name] += one.nbytes
    return ", ".join(f"{name} {nbytes / total:.1%}" for name, nbytes in sums.most_common())


def _tree(items: list[Rectangle], total: int, modules: list[str]) -> list[dict[str, Any]]:
    """Return the model, its modules and the rectangles in them, each with its parent."""
    numbers = {module: number for number, module in enumerate(modules, 1)}
    rows: list[dict[str, Any]] = [{"id": 0}]
    for module, number in numbers.items():
        words = module.split(".")
        name, short = cut_text(".".join(words[-2:]), LONGEST), cut_text(words[-1], LONGEST)
        rows.append({"id": number, "parent": 0, "name": name, "short": short})
    for index, one in enumerate(items, len(numbers) + 1):
        name = one.part or one.module.rpartition(".")[2]
        place = f"{one.module}.{one.part}" if one.part else one.module
        says = f"{one.type_name}, {counted(one.tensors, 'tensor')}, {size(one.nbytes)}"
        row = {
            "id": index,
            "parent": numbers[one.module],
            "bytes": one.nbytes,
            "type": family_of_type(one.type_name),
            "name": cut_text(name, LONGEST),
            "short": cut_text(name.rpartition(".")[2], LONGEST),
            "tip": tip_of(cut_text(place, LONGEST), f"{says} ({one.nbytes / total:.1%})"),
        }
        if one.module != _ALL and len(place) <= LONGEST and place.isprintable():
            row["place"] = place  # by which a page lists its tensors
        rows.append(row)
    return rows
