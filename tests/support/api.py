"""What a user can reach from ``blobstore``: its names, and the objects that they return.

``python tests/support/api.py`` writes the section "Objects" of docs/api.md anew, from docstrings.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import blobstore

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
BEGIN = "<!-- Objects: written by tests/support/api.py -->\n"


def returned_classes() -> dict[str, type]:
    """Return the public classes, and those whose values the public functions return, by name."""
    found: dict[str, type] = {}
    for name in blobstore.__all__:
        value = getattr(blobstore, name)
        if inspect.isclass(value):
            found[name] = value
        elif inspect.isfunction(value):
            found |= _returned_by(value)
    return dict(sorted(found.items()))


def _returned_by(function: Any) -> dict[str, type]:
    names = vars(sys.modules[function.__module__])
    found = {}
    for word in re.findall(r"[A-Z]\w+", str(inspect.signature(function).return_annotation)):
        kind = names.get(word) or getattr(blobstore, word, None)
        if inspect.isclass(kind) and kind.__module__.startswith("blobstore"):
            found[word] = kind
    return found


def public_attributes(kind: type) -> dict[str, Any]:
    """Return the attributes of our own that a class and its bases define, by name."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if base.__module__.startswith("blobstore"):
            for name, annotation in inspect.get_annotations(base).items():
                found.setdefault(name, annotation)
            found = {**vars(base), **dict.fromkeys(_set_by(base)), **found}
    hidden = ("_", "KEYS")  # the keys of a result in JSON are in docs/json.md
    return {name: value for name, value in sorted(found.items()) if not name.startswith(hidden)}


def _set_by(kind: type) -> list[str]:
    """Return the attributes that a class's constructor sets."""
    made = vars(kind).get("__init__")
    if not inspect.isfunction(made) or "blobstore" not in made.__code__.co_filename:
        return []  # a dataclass's, which has no source
    return re.findall(r"self\.([a-z]\w*)(?:: [^=]+)? = ", inspect.getsource(made))


def objects() -> str:
    """Return the section: a table for each class, with a row for each of its names."""
    return "\n".join(_table(name, kind) for name, kind in returned_classes().items())


def _table(name: str, kind: type) -> str:
    lines = [f"### `{name}`", "", _summary(kind), ""]
    fields, rows = [], []
    for attribute, value in public_attributes(kind).items():
        shown = _row(attribute, value)
        if shown is None:
            fields.append(f"`{attribute}`")
        else:
            rows.append(shown)
    if fields:
        lines += [f"Fields: {', '.join(fields)}.", ""]
    if rows:
        lines += ["| name | what it gives |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(name: str, value: Any) -> str | None:
    """Return the row of a method or property; None for a field."""
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if inspect.isfunction(value):
        parameters = list(inspect.signature(value).parameters.values())
        names = [_parameter(one) for one in parameters if one.name not in ("self", "cls")]
        return f"| `{name}({', '.join(names)})` | {_summary(value)} |"
    if isinstance(value, property) or hasattr(value, "func"):
        return f"| `{name}` | {_summary(value)} |"
    return None


def _parameter(parameter: inspect.Parameter) -> str:
    name = str(parameter).partition(":")[0].partition("=")[0]  # with its stars
    return name if parameter.default is parameter.empty else f"{name}=…"


def _summary(value: Any) -> str:
    text = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    return text.replace("``", "`").replace("|", "\\|")


def page() -> str:
    """Return docs/api.md with its section of objects as it has to be."""
    before, found, _ = PAGE.read_text().partition(BEGIN)
    if not found:
        raise ValueError(f"{PAGE} lacks the line {BEGIN.strip()}")
    return f"{before}{BEGIN}\n{objects()}"


if __name__ == "__main__":
    PAGE.write_text(page())
