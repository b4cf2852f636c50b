"""The heat map of errors as text: a row of bars for each projection, one for each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blobstore.plots.heatmap import Cell, cells, row_labels
from blobstore.plots.subjects import TensorError
from blobstore.views.quantities import printable

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = ".:-=+*#@"
_COLOURS = (36, 36, 32, 32, 33, 33, 31, 31)
"""Of a terminal, by level: cyan, green, yellow, red."""
_MOST_ROWS = 30
_LEAST_BARS = 8
_FIGURE = 9
_WIDEST = 4
"""Characters of a bar, if there are few layers."""


def error_lines(
    tensors: Iterable[TensorError], width: int, *, ascii_only: bool, colours: bool
) -> list[str]:
    """Return the lines of the plot, each at most ``width`` characters wide; [] without an error.

    Bars grow from 0 to the largest relative rmse. If there are more layers than fit, a bar is the
    worst of several. Only the thirty worst projections are shown.
    """
    found = cells(tensors)
    highest = max((cell.error for cell in found), default=0.0)
    if not highest:
        return []
    rows: dict[str, list[Cell]] = {}
    for cell in found:
        rows.setdefault(cell.row, []).append(cell)
    largest = {row: max(cell.error for cell in rows[row]) for row in rows}
    worst = sorted(rows, key=lambda row: -largest[row])[:_MOST_ROWS]
    labels = {row: printable(label) for row, label in row_labels(found).items() if row in worst}
    layers = sorted({cell.column for cell in found if cell.column is not None})
    room_of_names = max(12, width - _FIGURE - 2 - max(_LEAST_BARS, len(layers)))
    names = min(max(map(len, labels.values())), room_of_names)
    room = max(1, width - names - _FIGURE - 2)
    bars = max(1, min(len(layers), room))
    each = max(1, min(_WIDEST, room // bars))
    signs, cut = (_ASCII, "~") if ascii_only else (_BLOCKS, "…")

    def drawn(value: float | None) -> str:
        if value is None:
            return " " * each
        level = min(len(signs) - 1, int(value / highest * len(signs)))
        sign = signs[level] * each
        return f"\x1b[{_COLOURS[level]}m{sign}\x1b[0m" if colours else sign

    first = f" of layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else ""
    lines = [f"Relative rmse{first}, and the largest"[:width]]
    for row, label in labels.items():
        name = label if len(label) <= names else f"{cut}{label[1 - names :]}"
        plot = "".join(map(drawn, _merged(rows[row], layers, bars)))
        lines.append(f"{name:<{names}} {plot} {largest[row]:>{_FIGURE - 1}.3%}")
    return lines


def _merged(row: list[Cell], layers: Sequence[int], bars: int) -> list[float | None]:
    """Return the worst error of each bar; a tensor outside the layers is the first bar."""
    found: list[float | None] = [None] * bars
    places = {layer: index * bars // len(layers) for index, layer in enumerate(layers)}
    for cell in row:
        place = 0 if cell.column is None else places[cell.column]
        found[place] = max(found[place] or 0.0, cell.error)
    return found
