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


def family_of_type(type_name: str) -> str:
    """Return the type that gives a type its colour: ``int4`` of ``int4/64``."""
    name = type_name.partition("/")[0]
    if name in COLOURS:
        return name
    if name.startswith("F8"):
        return "F8"
    return "integers" if name.startswith(_INTEGERS) else "other"


def colour_of(type_name: str) -> str:
    """Return the colour of a type, as ``#rrggbb``."""
    return COLOURS.get(family_of_type(type_name), OTHER)


def ink_of(colour: str) -> str:
    """Return black or white, whichever has more contrast on a colour."""
    return max((_BLACK, _WHITE), key=lambda ink: contrast(ink, colour))


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, 1 to 21. Source: WCAG 2.2, "contrast ratio"."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``. Source: WCAG 2.2, "relative luminance"."""
    parts = (int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5))
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4  # noqa: PLR2004
        for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def families(type_names: Iterable[str]) -> list[str]:
    """Return the families of types, each once, in the palette's order."""
    order = [*COLOURS, "other"]
    return sorted({family_of_type(name) for name in type_names}, key=order.index)
