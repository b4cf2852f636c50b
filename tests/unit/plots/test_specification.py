"""Specifications: contrast of colours in both themes, no other colours, texts as text."""

from __future__ import annotations

import json
import re

from support.plotted import SPECIFICATIONS

from blobstore.formats.dtypes import DType
from blobstore.formats.quant import QuantType
from blobstore.plots.specification import COLOURS, family_of_type, themes

MEANINGFUL = {*COLOURS.values(), "#000000", "#ffffff"}


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


def test_texts_and_types_have_contrast_in_both_themes() -> None:
    for config in themes().values():
        page = config["background"]
        for part in ("axis", "legend"):
            assert contrast(config[part]["labelColor"], page) >= 4.5
            assert contrast(config[part]["titleColor"], page) >= 4.5
        for colour in [*COLOURS.values(), *config["range"]["pair"]]:
            assert contrast(colour, page) >= 3, colour


def test_every_type_has_a_colour_of_its_own_that_labels_can_be_read_on() -> None:
    assert {family_of_type(str(kind)) for kind in [*QuantType, *DType]} <= COLOURS.keys()
    assert all(family_of_type(f"{kind}/{kind.group_sizes[0]}") == str(kind) for kind in QuantType)
    assert len(set(COLOURS.values())) == len(COLOURS)
    for colour in COLOURS.values():  # the treemap writes in black or white
        assert max(contrast(ink, colour) for ink in ("#000000", "#ffffff")) >= 4.5


def test_specifications_have_no_other_colour_no_font_and_no_address() -> None:
    for name, spec in SPECIFICATIONS.items():
        text = json.dumps(spec)
        assert set(re.findall("#[0-9a-fA-F]{3,8}", text)) <= MEANINGFUL, name
        assert '"font"' not in text
        assert "http" not in text.replace("https://vega.github.io/schema/vega/v6.json", "")


def test_hostile_names_are_printable_text_in_specifications() -> None:
    texts = {name: json.dumps(spec, ensure_ascii=False) for name, spec in SPECIFICATIONS.items()}
    assert [name for name, text in texts.items() if not text.isprintable()] == []
    assert {name for name, text in texts.items() if "<img src=x" in text} == {
        name for name in SPECIFICATIONS if name.startswith("hostile")
    }


def test_specifications_have_a_description_and_their_values_as_a_table() -> None:
    for name, spec in SPECIFICATIONS.items():
        table = spec["usermeta"]["table"]
        assert spec["description"].endswith((".", "%"))
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
        assert bool(table["rows"]) is not name.startswith("empty")
