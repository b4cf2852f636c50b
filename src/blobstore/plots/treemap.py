"""A treemap: the bytes of a model by module, coloured by type.

A model of many tensors is drawn coarser, until there are few enough rectangles: first experts of a
layer together, then whole parts of a layer, then whole layers, and then all layers.
Each rectangle is of one type, and the sum of all is the model's bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from blobstore.plots.specification import (
    Specification,
    Weighed,
    coloured,
    empty,
    family_of_type,
    ink_of,
    specification,
    tip_of,
)
from blobstore.views.quantities import counted, size

_LAYER = re.compile(r"(.*?(?:^|\.))([0-9]{1,9})(\..*|$)", re.ASCII | re.DOTALL)
_FIRST_NUMBER = re.compile(r"(?:^|(?<=\.))[0-9]{1,9}(?=\.|\Z)", re.ASCII)
_NUMBER = re.compile(r"(?<=\.)[0-9]{1,9}(?=\.|$)", re.ASCII)
_DIGITS = re.compile(r"([0-9]{1,18})", re.ASCII)
_WEIGHT = ".weight"
_LONGEST = 120


def module_and_part(name: str) -> tuple[str, str]:
    """Return the module that a tensor is drawn in, and its name in there.

    The module ends at the first number, else before the tensor's own word.
    """
    name = name.removesuffix(_WEIGHT)
    match = _FIRST_NUMBER.search(name)
    if match:
        return name[: match.end()], name[match.end() + 1 :]
    module, _, last = name.rpartition(".")
    return (module, last) if module else (name, "")


def layer_and_projection(name: str) -> tuple[int | None, str]:
    """Return a tensor's layer, None without one, and its name with a star for each number."""
    name = name.removesuffix(_WEIGHT)
    match = _LAYER.fullmatch(name)
    if match is None:
        return None, name
    return int(match[2]), f"{match[1]}*{starred(match[3])}"


def natural(place: Sequence[object]) -> list[list[tuple[int, str]]]:
    """Return the key that sorts names as people do: layer 2 before layer 10."""
    return [
        [(int(word) if _DIGITS.fullmatch(word) else -1, word) for word in _DIGITS.split(str(part))]
        for part in place
    ]


def starred(name: str) -> str:
    """Return a name with a star for each part that is a number."""
    return _NUMBER.sub("*", name)


def shortened_names(names: list[str]) -> dict[str, str]:
    """Return short labels by name: without the leading words that all have in common.

    A label keeps at least one word, and at most 120 characters.
    """
    parts = [name.split(".") for name in names]
    common = 0
    while all(len(words) > common + 1 for words in parts) and len({w[common] for w in parts}) == 1:
        common += 1
    if len(names) < 2:  # noqa: PLR2004  # one name shares nothing
        common = 0
    return {
        name: ".".join(words[common:])[:_LONGEST] for name, words in zip(names, parts, strict=True)
    }


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

    They are sorted by module and part. If there are more modules than that, all are one,
    ``all modules``.
    """
    rows = [(*module_and_part(one.name), one.type_name, one.nbytes) for one in tensors]
    for coarser in _COARSENESS:
        if (found := _drawn(rows, coarser, most)) is not None:
            return sorted(found, key=natural)
    together = [(_ALL, "", type_name, nbytes) for _, _, type_name, nbytes in rows]
    return sorted(_drawn(together, _COARSENESS[-1], len(rows)) or [], key=natural)


def _drawn(rows: list[_Row], coarser: Callable[[str], str], most: int) -> list[Rectangle] | None:
    """Return the rectangles of one coarseness, unsorted; None if there are more than ``most``."""
    parts = {part: coarser(part) for part in {part for _, part, _, _ in rows}}  # few: layers repeat
    numbers: Counter[tuple[str, str, str]] = Counter()
    sums: Counter[tuple[str, str, str]] = Counter()
    for module, part, type_name, nbytes in rows:
        place = (module, parts[part], type_name)
        numbers[place] += 1
        sums[place] += nbytes
    if len(sums) > most:
        return None
    return [Rectangle(*place, numbers[place], sums[place]) for place in sums]


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
    description = (
        f"Treemap: {size(total)} in {counted(number, 'tensor')} by module,"
        f" coloured by type. {_shares(found, total)}."
    )
    largest = sorted(found, key=lambda one: (-one.nbytes, one))[:_ROWS]
    plot = specification(
        "treemap",
        description,
        height=_HEIGHT,
        table=(
            ("module", "part", "type", "tensors", "size", "share"),
            [(*one[:4], size(one.nbytes), f"{one.nbytes / total:.1%}") for one in largest],
        ),
        data={"tree": _tree(found, total, modules)},
        signals={"header": _HEADER if len(modules) <= _MOST_LABELLED else 0},
    )
    return coloured(plot, (one.type_name for one in found))


def _shares(found: list[Rectangle], total: int) -> str:
    sums: Counter[str] = Counter()
    for one in found:
        sums[one.type_name] += one.nbytes
    return ", ".join(f"{name} {nbytes / total:.1%}" for name, nbytes in sums.most_common())


def _tree(found: list[Rectangle], total: int, modules: list[str]) -> list[dict[str, Any]]:
    """Return the model, its modules and the rectangles in them, each with its parent."""
    numbers = {module: index + 1 for index, module in enumerate(modules)}
    rows: list[dict[str, Any]] = [{"id": 0}]
    for module, number in numbers.items():
        words = module.split(".")
        name, short = _cut(".".join(words[-2:])), _cut(words[-1])
        rows.append({"id": number, "parent": 0, "name": name, "short": short})
    for index, one in enumerate(found, len(numbers) + 1):
        name = one.part or one.module.rpartition(".")[2]
        place = f"{one.module}.{one.part}" if one.part else one.module
        says = f"{one.type_name}, {counted(one.tensors, 'tensor')}, {size(one.nbytes)}"
        row = {
            "id": index,
            "parent": numbers[one.module],
            "bytes": one.nbytes,
            "type": family_of_type(one.type_name),
            "ink": ink_of(one.type_name),
            "name": _cut(name),
            "short": _cut(name.rpartition(".")[2]),
            "tip": tip_of(_cut(place), f"{says} ({one.nbytes / total:.1%})"),
        }
        if one.module != _ALL and len(place) <= _LONGEST and place.isprintable():
            row["place"] = place  # by which a page lists its tensors
        rows.append(row)
    return rows


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
