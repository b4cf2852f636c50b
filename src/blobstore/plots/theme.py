"""Light and dark: Vega configurations, with every colour and font that does not mean a type.

A page passes one when it parses a specification: ``vega.parse(specification, configuration)``.
"""

from __future__ import annotations

from typing import Any, Literal

Theme = Literal["light", "dark"]

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
_RAMPS = {
    "light": ["#fdf3d8", "#f6c667", "#e88b3c", "#bf4a3a", "#7a1f4b", "#37104a"],
    "dark": ["#2a2440", "#5a2f6d", "#a13d66", "#dc6a4c", "#f5b45c", "#fdf1c4"],
}
"""Of errors, from small to large: away from the page, and ever lighter or darker."""
_COLOURS = {
    "light": {
        "page": "#ffffff",
        "text": "#1c2128",
        "quiet": "#57606a",
        "grid": "#e4e7eb",
        "line": "#8c959f",
        "first": "#0a74c4",
        "second": "#b4460a",
    },
    "dark": {
        "page": "#15181d",
        "text": "#e8eaed",
        "quiet": "#a3abb5",
        "grid": "#2c3138",
        "line": "#6b747e",
        "first": "#58a9e8",
        "second": "#f08a4b",
    },
}
THEMES: tuple[Theme, ...] = ("light", "dark")


def configuration(theme: Theme) -> dict[str, Any]:
    """Return the Vega configuration of a theme."""
    colours = _COLOURS[theme]
    text = {"font": FONT, "fill": colours["text"], "fontSize": 12}
    return {
        "background": colours["page"],
        "axis": {
            "domainColor": colours["line"],
            "gridColor": colours["grid"],
            "tickColor": colours["line"],
            "labelColor": colours["quiet"],
            "titleColor": colours["text"],
            "labelFont": FONT,
            "titleFont": FONT,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "titlePadding": 8,
        },
        "legend": {
            "offset": 8,
            "labelColor": colours["text"],
            "titleColor": colours["text"],
            "labelFont": FONT,
            "titleFont": FONT,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
        },
        "title": {
            "color": colours["text"],
            "font": FONT,
            "fontSize": 13,
            "fontWeight": "normal",
            "anchor": "start",
        },
        "range": {"ramp": _RAMPS[theme], "pair": [colours["first"], colours["second"]]},
        "style": {
            "guide-label": {"font": FONT},
            "guide-title": {**text, "fontSize": 13, "fontWeight": "normal"},
            "tile": {"stroke": colours["page"], "strokeWidth": 0.5},
            "tile-label": {"font": FONT, "fontSize": 11},
            "tile-header": {**text, "fontSize": 11},
            "cell": {"stroke": colours["page"], "strokeWidth": 0.5},
            "front": {"stroke": colours["quiet"], "strokeWidth": 1.5},
            "dot": {"stroke": colours["page"], "strokeWidth": 0.5, "fillOpacity": 0.8},
            "label": text,
        },
    }
