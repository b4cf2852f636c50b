"""Tree: tensors by module, the dots of their names being its branches. Pure.

Modules with numbers for names that are alike (the layers of a model, the experts of a layer) are one branch: ``0-31``.
Whatever is shown of it is the sum of them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from blobstore.inspection.counting import LogicalTensor

_MAX_DEPTH = 32
"""Dots of a name beyond these branch no more: a name may have a hundred thousand."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of a tree. ``alike`` is how many modules it stands for; ``types`` are the weights of each type."""

    depth: int
    name: str
    alike: int
    tensors: int
    parameters: int
    nbytes: int
    types: tuple[tuple[str, int], ...]
    shape: tuple[int, ...] | None


@dataclass(slots=True)
class _Node:
    """A module, or a tensor: then it has a shape."""

    children: dict[str, _Node] = field(default_factory=dict)
    own: list[LogicalTensor] = field(default_factory=list)
    form: int = 0
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    types: dict[str, int] = field(default_factory=dict)


def tree_of(tensors: Iterable[LogicalTensor], depth: int | None = None) -> Iterator[Branch]:
    """Yield the branches of a tree, each after its parent, in the order of the tensors; ``depth`` levels, all for None.

    A module with only one child is shown with it on one line: ``model.layers``.
    """
    root = _Node()
    for tensor in tensors:
        _plant(root, tensor)
    _measure(root, {})
    yield from _branches([root], 0, _MAX_DEPTH if depth is None else depth)


def _plant(root: _Node, tensor: LogicalTensor) -> None:
    node = root
    for part in tensor.name.split(".", _MAX_DEPTH - 1):
        node = node.children.setdefault(part, _Node())
    node.own.append(tensor)


def _measure(node: _Node, forms: dict[tuple[object, ...], int]) -> None:
    """Fill in the sums of a node, and its form: a number that nodes have in common that are alike."""
    for child in node.children.values():
        _measure(child, forms)
        node.tensors += child.tensors
        node.parameters += child.parameters
        node.nbytes += child.nbytes
        _add(node.types, child.types)
    for tensor in node.own:
        node.tensors += 1
        node.parameters += tensor.parameters
        node.nbytes += tensor.nbytes
        _add(node.types, {tensor.type_name: tensor.parameters})
    own = tuple((tensor.type_name, tensor.shape, tensor.nbytes) for tensor in node.own)
    form = (own, *((name, node.children[name].form) for name in sorted(node.children)))
    node.form = forms.setdefault(form, len(forms))


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for kind, count in more.items():
        counts[kind] = counts.get(kind, 0) + count


def _branches(alike: list[_Node], depth: int, levels: int) -> Iterator[Branch]:
    """Yield what is below nodes that are alike: the first one's children, each with those of the others."""
    if depth >= levels:
        return
    for name, nodes in _grouped(alike):
        label, inner = name, nodes
        while len(inner[0].children) == 1 and not inner[0].own:
            (child,) = inner[0].children
            if _is_number(child):
                break
            label, inner = f"{label}.{child}", [node.children[child] for node in inner]
        yield _branch(depth, label, len(nodes) // len(alike), inner)
        yield from _branches(inner, depth + 1, levels)


def _grouped(alike: list[_Node]) -> Iterator[tuple[str, list[_Node]]]:
    """Yield the children of nodes that are alike by name; those with numbers that are alike too together."""
    groups: dict[object, list[str]] = {}
    for name, child in alike[0].children.items():
        groups.setdefault(child.form if _is_number(name) else name, []).append(name)
    for names in groups.values():
        label = names[0] if len(names) == 1 else _ranges(sorted(map(int, names)))
        yield label, [node.children[name] for node in alike for name in names]


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) <= 9  # noqa: PLR2004  # longer ones are hashes


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as a person writes them: ``0-3,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _branch(depth: int, name: str, alike: int, nodes: list[_Node]) -> Branch:
    types: dict[str, int] = {}
    for node in nodes:
        _add(types, node.types)
    first = nodes[0]
    leaf = first.own[0].shape if len(first.own) == 1 and not first.children else None
    return Branch(
        depth=depth,
        name=name,
        alike=alike,
        tensors=sum(node.tensors for node in nodes),
        parameters=sum(node.parameters for node in nodes),
        nbytes=sum(node.nbytes for node in nodes),
        types=tuple(sorted(types.items(), key=lambda item: -item[1])),
        shape=leaf,
    )
