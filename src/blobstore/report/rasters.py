"""PNG files of plots, drawn by `vl-convert` with the Vega that the package bundles."""

from __future__ import annotations

from types import ModuleType
from typing import cast

from blobstore.errors import UsageError
from blobstore.plots.specification import Specification
from blobstore.plots.theme import Theme, configuration

SCALE = 2
"""Pixels of a picture for each of a page."""


def drawn_png(plot: Specification, theme: Theme = "light") -> bytes:
    """Return a plot as a PNG file. Raises: UsageError when vl-convert is not installed."""
    spec = {key: value for key, value in plot.items() if key != "usermeta"}
    spec["config"] = configuration(theme)
    return cast("bytes", check_drawable().vega_to_png(spec, scale=SCALE, allowed_base_urls=[]))


def check_drawable() -> ModuleType:
    """Return vl-convert. Raises: UsageError when it is not installed."""
    try:
        import vl_convert
    except ImportError as error:
        hint = "Install the extra: pip install 'blobstore[plots]'."
        raise UsageError("vl-convert is not installed", hint=hint) from error
    return vl_convert
