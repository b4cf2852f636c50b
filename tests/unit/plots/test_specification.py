"""Specifications: a colour for each type, no other colours, texts as text."""

import json
import re

from support.plotted import SPECIFICATIONS

from blobstore.formats.dtypes import DType
from blobstore.formats.quant import QuantType
from blobstore.plots.specification import COLOURS, family_of_type

MEANINGFUL = {*COLOURS.values(), "#000000", "#ffffff"}


def test_every_type_has_a_colour_of_its_own() -> None:
    assert {family_of_type(str(kind)) for kind in [*QuantType, *DType]} <= COLOURS.keys()
    assert all(family_of_type(f"{kind}/{kind.group_sizes[0]}") == str(kind) for kind in QuantType)
    assert len(set(COLOURS.values())) == len(COLOURS)


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
