"""Colours: contrast of types and texts in both themes, and no colour in a specification."""

from __future__ import annotations

import json
import re

import pytest
from support.plotted import SPECIFICATIONS

from blobstore.formats.dtypes import DType
from blobstore.formats.quant import QuantType
from blobstore.plots.charts import TensorError, errors
from blobstore.plots.specification import COLOURS, Theme, family_of_type, themes


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, 1 to 21. Source: WCAG 2.2, "contrast ratio"."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``. Source: WCAG 2.2, "relative luminance"."""
    parts = (int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5))
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


MEANINGFUL = {*COLOURS.values(), "#000000", "#ffffff"}


@pytest.mark.parametrize("theme", themes())
def test_texts_and_types_have_contrast(theme: Theme) -> None:
    config = themes()[theme]
    page = config["background"]
    for part in ("axis", "legend"):
        for kind in ("labelColor", "titleColor"):
            assert contrast(config[part][kind], page) >= 4.5, (part, kind)
    for colour in [*COLOURS.values(), *config["range"]["pair"]]:
        assert contrast(colour, page) >= 3, colour
    first, second = config["range"]["pair"]
    assert first != second


@pytest.mark.parametrize("name", COLOURS)
def test_labels_on_types_have_contrast(name: str) -> None:
    """The treemap writes in black or white, whichever has more contrast."""
    assert max(contrast(ink, COLOURS[name]) for ink in ("#000000", "#ffffff")) >= 4.5


@pytest.mark.parametrize("kind", [*QuantType, *DType])
def test_every_type_has_a_colour(kind: QuantType | DType) -> None:
    assert family_of_type(str(kind)) in COLOURS
    if isinstance(kind, QuantType):
        assert family_of_type(f"{kind}/{kind.group_sizes[0]}") == str(kind)


def test_colours_of_types_differ() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)


@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_specifications_have_no_other_colour_and_no_font(name: str) -> None:
    text = json.dumps(SPECIFICATIONS[name])
    assert set(re.findall("#[0-9a-fA-F]{3,8}", text)) <= MEANINGFUL
    assert '"font"' not in text
    assert "http" not in text.replace("https://vega.github.io/schema/vega/v6.json", "")


@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_names_do_not_turn_the_text_beside_them(name: str) -> None:
    text = json.dumps(SPECIFICATIONS[name], ensure_ascii=False)
    assert text.isprintable()
    assert ("<img src=x" in text) is name.startswith("hostile")


def test_names_that_browsers_can_t_lay_out_are_cut() -> None:
    name = "model.layers.0." + "L" * 60_000
    spec = errors([TensorError(name, "int4", (64, 64), 0.1)])
    assert name[:300] in json.dumps(spec)
    assert len(json.dumps(spec)) < 10_000


def test_a_name_that_vega_would_lose_is_another() -> None:
    spec = errors([TensorError("__proto__", "int4", (64, 64), 0.1)])
    assert '"__proto__"' not in json.dumps(spec)


@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_specifications_are_described_and_have_their_values_as_text(name: str) -> None:
    spec = SPECIFICATIONS[name]
    table = spec["usermeta"]["table"]
    assert spec["description"].endswith((".", "%"))
    assert all(len(row) == len(table["columns"]) for row in table["rows"])
    assert bool(table["rows"]) is not name.startswith("empty")
