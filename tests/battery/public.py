"""The public names with their parameters, and the options that ``--help`` shows."""

from __future__ import annotations

import importlib
import inspect
import re
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from battery.scenarios import World

_MODULES = tuple(
    f"blobstore{part}" for part in ("", ".distributed", ".errors", ".mlx_lm", ".testing")
)


def signatures() -> dict[str, Any]:
    """Return what the public modules hold: of each name its kind, parameters and members."""
    return {name: _members(importlib.import_module(name)) for name in _MODULES}


def _members(module: Any) -> dict[str, Any]:
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return {name: _described(getattr(module, name)) for name in sorted(names)}


def _described(value: Any) -> Any:
    if inspect.ismodule(value):
        return "module"
    if not inspect.isclass(value):
        return _parameters(value) if callable(value) else type(value).__name__
    ours = [base for base in value.__mro__ if base.__module__.startswith("blobstore")]
    names = {name for base in ours for name in vars(base) if not name.startswith("_")}
    members = {name: _member(value, name) for name in sorted(names)}
    return {"parameters": _parameters(value), "members": members}


def _member(owner: type, name: str) -> str:
    value = inspect.getattr_static(owner, name)
    if isinstance(value, (classmethod, staticmethod)) or inspect.isfunction(value):
        return _parameters(getattr(owner, name))
    return "attribute"


def _parameters(value: Any) -> str:
    """Return parameters as ``(name, *, other=default)``, without their types."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "?"
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+|<factory>|<object object[^>]*>", "…", text)


def helps(world: World) -> dict[str, Any]:
    """Return what ``--help`` shows of each command: options, arguments, defaults, and words."""
    first = _help(world, [])
    found = {"blobstore": first}
    for command in first["commands"]:
        found[command] = _help(world, [command])
        for below in found[command]["commands"]:
            found[f"{command} {below}"] = _help(world, [command, below])
    return found


def _help(world: World, words: list[str]) -> dict[str, Any]:
    code, out, _ = world.command([*words, "--help"], world.root, {"COLUMNS": "200"})
    rows = _rows(out.decode())
    options = [row for part, row in rows if part == "Options"]
    arguments = [row.removeprefix("*").strip() for part, row in rows if part == "Arguments"]
    others = [row for part, row in rows if part not in {"", "Options", "Arguments"}]
    found: dict[str, Any] = {
        "exit": code,
        "commands": sorted(row.split()[0] for row in others),
        "options": {_names(row): _default(row) for row in options},
        "arguments": {row.split()[0].upper(): _default(row) for row in arguments},
    }
    return found | {"words": [" ".join(row.split()) for _, row in rows]}


def _names(row: str) -> str:
    """Return the names that an option's row begins with."""
    words = row.replace(",", " ").replace("/", " ").split()
    return " ".join(sorted(takewhile(lambda word: word.startswith("-"), words)))


def _default(row: str) -> list[str]:
    """Return the default and the limits of an option or an argument."""
    found = [" ".join(text.split()) for text in re.findall(r"\[([^\]]*)\]", row)]
    return [text for text in found if re.match(r"default|required|.*[<>]=", text)]


def _rows(text: str) -> list[tuple[str, str]]:
    """Return the rows of a help with the part each is in, with what continues a row joined to it.

    Both layouts are read: indented columns, and panels with frames.
    """
    found: list[tuple[str, str]] = []
    part, indent = "", 0
    for line in text.splitlines():
        bare = re.sub(r"[│╭╮╰╯─]", " ", line).rstrip()
        depth = len(bare) - len(bare.lstrip())
        if line.startswith("╭") or re.fullmatch(r"[A-Z].*:", line):
            part, indent = bare.strip().removesuffix(":"), 0
        elif bare and indent and depth > indent:
            found[-1] = (part, f"{found[-1][1]} {bare.strip()}")
        elif bare:
            indent = depth
            found.append((part, bare.strip()))
    return found
