"""The plot of a terminal: its width, its signs, its colours."""

from __future__ import annotations

import pytest
from support.plotted import HOSTILE, layer_errors

from blobstore.plots.charts import TensorError, error_lines


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("layers", [1, 5, 80, 500])
def test_lines_fit(width: int, layers: int) -> None:
    lines = error_lines(layer_errors(layers), width, ascii_only=False, colours=False)
    assert max(map(len, lines)) <= width
    assert len(lines) == 5


def test_bars_are_errors() -> None:
    found = [TensorError(f"l.{n}.up", "int4", (2, 2), n / 8) for n in range(1, 9)]
    (_, line) = error_lines(found, 80, ascii_only=False, colours=False)
    assert "".join(dict.fromkeys(line.split()[1])) == "▂▃▄▅▆▇█"
    assert line.endswith("100.000%")


def test_ascii_and_colours() -> None:
    plain = "\n".join(error_lines(layer_errors(4), 80, ascii_only=True, colours=False))
    assert plain.isascii()
    assert "\x1b" not in plain
    assert "\x1b[31m" in "\n".join(error_lines(layer_errors(4), 80, ascii_only=True, colours=True))


def test_names_do_not_act_on_the_terminal() -> None:
    lines = error_lines(layer_errors(2, HOSTILE), 200, ascii_only=False, colours=False)
    assert all(line.isprintable() for line in lines)


def test_nothing_changed_is_nothing_drawn() -> None:
    kept = [TensorError("a", "BF16", (2,), 0.0, kept=True)]
    assert error_lines(kept, 80, ascii_only=False, colours=False) == []
