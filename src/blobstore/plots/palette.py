"""The colours that mean a type of weights: one each, in every plot and theme.

Each has a contrast of at least 3 against a white and against a dark page (WCAG 2.2, 1.4.11), and
its ink, black or white, has at least 4.5 on it (1.4.3). The hues are those of Okabe and Ito's
palette for the colour-blind, darker or lighter where the contrast asks for it. No plot relies on
colour alone: names of types are in labels, tooltips and tables.
"""

from __future__ import annotations

from collections.abc import Iterable

COLOURS = {
    "int4": "#0a74c4",
    "int8": "#008a8a",
    "nvfp4": "#d4570a",
    "mxfp4": "#a97000",
    "mxfp8": "#b8518f",
    "BF16": "#6f7783",
    "F16": "#7d6ad8",
    "F32": "#3f8f3a",
    "F8": "#c8475b",
    "integers": "#8b6b52",
}
OTHER = "#7a7a5c"
_INTEGERS = ("BOOL", "I", "U")
_BLACK, _WHITE = "#000000", "#ffffff"
_DARK = {"int4", "F8", "integers"}
"""Types on which white text has more contrast than black text."""


def family_of_type(type_name: str) -> str:
    """Return the type that gives a type its colour: ``int4`` of ``int4/64``."""
    name = type_name.partition("/")[0]
    if name in COLOURS:
        return name
    if name.startswith("F8"):
        return "F8"
    return "integers" if name.startswith(_INTEGERS) else "other"


def ink_of(type_name: str) -> str:
    """Return the colour of text on a type's colour: black or white, whichever has more contrast."""
    return _WHITE if family_of_type(type_name) in _DARK else _BLACK


def families(type_names: Iterable[str]) -> list[str]:
    """Return the families of types, each once, in the palette's order."""
    order = [*COLOURS, "other"]
    return sorted({family_of_type(name) for name in type_names}, key=order.index)
