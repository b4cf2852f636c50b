"""Tables of tensors: each on a line in number order, or alike modules together in a tree."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

from typer import Option

from blobstore.cli.output import count, cut_text, shape, show_table, size
from blobstore.names import shortened
from blobstore.views.quantities import natural

LONGEST_NAME = 96
_MOST_TYPES = 3
_INDENT = "  "

EveryTensor = Annotated[
    bool, Option("--tensors", help="List all tensors, instead of modules that are alike together.")
]
Top = Annotated[
    int | None,
    Option(
        metavar="N",
        min=1,
        help="List only the N tensors of the largest error; without errors, of the largest size.",
    ),
]
Cells = Callable[[Sequence[Any]], tuple[str, ...]]
"""Makes the cells of one tensor, or of several together."""
SIZES = ("PARAMETERS", "SIZE")


def sizes(tensors: Sequence[Any]) -> tuple[str, str]:
    """Return the cells of `SIZES`."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return count(sum(tensor.parameters for tensor in tensors)), size(nbytes)


def in_number_order(tensors: Iterable[Any]) -> list[Any]:
    """Return tensors in the order of their names, with layer 2 before layer 10."""
    return sorted(tensors, key=lambda tensor: natural(tensor.name))


def show_each(
    tensors: Iterable[Any], headings: Sequence[str], cells: Cells, *more: Sequence[str]
) -> None:
    """Print tensors in their order, one a line; ``more``: rows after them."""
    rows = [
        (_cut(tensor.name), tensor.type_name, _cut(shape(tensor.shape)), *cells([tensor]))
        for tensor in tensors
    ]
    show_table(("TENSOR", "TYPE", "SHAPE", *headings), [*rows, *more])


def show_tree(
    tensors: Iterable[Any],
    headings: Sequence[str],
    cells: Cells,
    *more: Sequence[str],
    depth: int | None = None,
    every: bool = False,
) -> None:
    """Print the modules of tensors as a tree, in number order, of at most ``depth`` levels.

    ``every``: print each tensor instead.
    """
    if every:
        show_each(in_number_order(tensors), headings, cells, *more)
        return
    from blobstore.inspection.inspection import tree_of

    rows = []
    for branch in tree_of(in_number_order(tensors), depth):
        alike = f" ({branch.alike:,} alike)" if branch.alike > 1 else ""
        name = f"{_INDENT * branch.depth}{_cut(branch.name)}{alike}"
        dims = "" if branch.shape is None else _cut(shape(branch.shape))
        rows.append((name, shortened(branch.types, _MOST_TYPES), dims, *cells(branch.tensors)))
    show_table(("MODULE", "TYPE", "SHAPE", *headings), [*rows, *more])


def _cut(text: str) -> str:
    return cut_text(text, LONGEST_NAME)
