"""Specifications: the Vega documents of ``specifications/``, filled with values.

Vega draws; Python only fills in tables of data, domains of scales, signals, and the same values as
text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

from blobstore.errors import UsageError
from blobstore.inspection.comparison import ChangedTensor
from blobstore.views.quantities import cut_text, printable

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


Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
Specification = dict[str, Any]
"""A Vega specification: JSON, ready to be parsed by Vega 6."""

SCALE = 2
"""Pixels of a picture for each of a page."""
SCHEMA = "https://vega.github.io/schema/vega/v6.json"
"""The name of the format; Vega does not fetch it."""
WIDTH = 960
"""Pixels; a page sets the signal ``width`` to the room that it has."""


def specification(
    name: str,
    description: str,
    *,
    height: int,
    table: tuple[Sequence[str], Iterable[Sequence[Any]]] = ((), ()),
    data: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    domains: Mapping[str, Sequence[Any]] | None = None,
    signals: Mapping[str, Any] | None = None,
) -> Specification:
    """Return the document ``name`` with values.

    Width and height are all that the plot takes, its axes and legends included. ``table``: the same
    values as text, names of columns and rows. ``data``, ``domains``, ``signals``: values by the
    names that the document gives. Characters of names that are not printable are escaped.
    """
    parts: dict[str, Any] = json.loads(_template(name))
    for one in parts.get("data", ()):
        if "values" in one:
            one["values"] = _readable((data or {}).get(one["name"], ()))
    for one in parts.get("scales", ()):
        if one["name"] in (domains or {}):
            one["domain"] = _readable((domains or {})[one["name"]])
    for one in parts.get("signals", ()):
        one["value"] = (signals or {}).get(one["name"], one["value"])
    columns, rows = table
    return {
        "$schema": SCHEMA,
        "description": _readable(description),
        "width": WIDTH,
        "height": height,
        "autosize": {"type": "fit", "contains": "padding", "resize": True},
        "padding": 4,
        **parts,
        "usermeta": {"table": {"columns": list(columns), "rows": _readable(list(rows))}},
    }


def configuration(theme: Theme) -> dict[str, Any]:
    """Return the Vega configuration of a theme: all colours and fonts that do not mean a type.

    A page passes it when it parses a specification: ``vega.parse(specification, configuration)``.
    """
    configurations: dict[str, dict[str, Any]] = json.loads(_template("themes"))
    return configurations[theme]


@cache
def _template(name: str) -> str:
    folder = resources.files("blobstore") / "plots" / "specifications"
    return (folder / f"{name}.json").read_text("utf-8")


_KEYS = {"__proto__": "__proto__ "}
"""Names that Vega 6 loses: it keeps axis labels as keys of a JavaScript object (DataJoin)."""


def _readable(value: Any) -> Any:
    """Return a value with what names from files would do to a line of text as escapes.

    Very long texts are cut: a name of 10,000 characters would be laid out for seconds.
    """
    if isinstance(value, str):
        return cut_text(_KEYS.get(value) or printable(value, keep="\n"))
    if isinstance(value, Mapping):
        return {key: _readable(one) for key, one in value.items()}
    return [_readable(one) for one in value] if isinstance(value, list | tuple) else value


def tip_of(*lines: str) -> str:
    """Return the text that a page shows for the mark under the pointer; names break no line."""
    return "\n".join(map(printable, lines))


def coloured(plot: Specification, type_names: Iterable[str]) -> Specification:
    """Return a plot whose scales of types have the families of these types, and their colours."""
    found = families(type_names)
    for scale in plot["scales"]:
        if scale["name"] in ("type", "shape"):
            scale["domain"] = found
        if scale["name"] == "type":
            scale["range"] = [COLOURS.get(name, OTHER) for name in found]
    return plot


def empty(description: str, sentence: str) -> Specification:
    """Return a plot of no values: a sentence."""
    plot = specification("empty", description, height=60)
    plot["marks"][0]["encode"]["update"]["text"] = {"value": sentence}
    return plot


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


class Weighed(NamedTuple):
    """A tensor: its name, its type in words (``int4/64``), shape before packing, stored bytes."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorError:
    """The error of a tensor against the one that it was made from.

    ``relative_rmse``: None if all weights are zero and the stored ones are not. ``kept``: it is
    stored as it was.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    relative_rmse: float | None
    kept: bool = False

    @property
    def weights(self) -> int:
        """The number of its weights."""
        return math.prod(self.shape)

    @classmethod
    def of_document(cls, tensor: Mapping[str, Any]) -> TensorError:
        """Return the error that a store kept, as ``quality --json`` prints it."""
        kind, shape = tensor["quant_type"] or tensor["dtype"] or "", tuple(tensor["shape"])
        return cls(tensor["name"], kind, shape, tensor["relative_rmse"], tensor["kept"])

    @classmethod
    def of_change(cls, change: ChangedTensor) -> TensorError:
        """Return the error of a tensor against that of another model; None if not measured."""
        relative = None if change.errors is None else change.errors.relative_rmse
        after = change.after
        return cls(after.name, after.type_name, after.shape, relative)


class ModelPoint(NamedTuple):
    """A model among others: its bytes, and its error against one source for all of them.

    ``type_name``: the type of most of its weights. ``relative_rmse``: of all its weights.
    """

    name: str
    type_name: str
    nbytes: int
    relative_rmse: float


class ModelBytes(NamedTuple):
    """The bytes of a model's blobs: those that no other model needs, and those that others do."""

    name: str
    unique: int
    shared: int

    @property
    def nbytes(self) -> int:
        """All its bytes."""
        return self.unique + self.shared
