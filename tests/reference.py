"""The pages of docs/reference: ``python tests/reference.py`` makes them from the code.

The command line's page is made from the help of each command, the API's from signatures and
docstrings, the page of ``--json`` from the classes of the results. What stands in the first two
before their first section is written there by hand.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import typer

import blobstore
from blobstore.cli import main
from blobstore.importer.arguments import ImportArguments
from blobstore.views import commands

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"


def pages() -> dict[str, str]:
    return {"cli": cli_page(), "api": api_page(), "json": commands.page()}


def _introduction(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text().partition("\n## ")[0]


def cli_page() -> str:
    group: Any = typer.main.get_command(main.app)
    context = group.context_class(group, info_name="blobstore")
    parts = [_introduction("cli")]
    for heading, names in main.HEADINGS.items():
        parts.append(f"\n## {heading}\n")
        for name in names:
            parts += _command(name, group.get_command(context, name), context)
    return "".join(parts)


def _command(name: str, command: Any, parent: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name, parent=parent)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    words = context.command_path.removeprefix("blobstore ")
    yield f"\n### `{words}`\n\n`{usage}`\n\n{_plain(command.help)}\n"
    records: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            records[parameter.param_type_name].append(record)
    for kind, rows in records.items():
        if rows:
            yield f"\n| {kind} | |\n|---|---|\n"
            for shown, says in rows:
                word = shown.partition(" <")[0]  # typer's name of an argument's type
                yield f"| `{_cell(word)}` | {_cell(says)} |\n"
    commands: dict[str, Any] = getattr(command, "commands", {})
    for inner_name, inner in commands.items():
        yield from _command(inner_name, inner, context)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def api_page() -> str:
    parts = [_introduction("api"), "\n## Functions\n"]
    for name, function in sorted(public_functions().items()):
        parts.append(f"\n### `{name}`\n\n```text\n{_signature(name, function)}\n```\n\n")
        parts.append(f"{_plain(function.__doc__)}\n")
    parts.append(f"\n## Options of an import\n\n{_plain(ImportArguments.__doc__)}\n\n")
    parts.append("| option | what it does |\n|---|---|\n")
    for name, hint in get_type_hints(ImportArguments, include_extras=True).items():
        parts.append(f"| `{name}` | {_cell(hint.__metadata__[0].help)} |\n")
    parts.append("\n## Classes\n\nThe public classes, and those that the functions return.\n")
    parts += [_class(name, kind) for name, kind in returned_classes().items()]
    parts.append(f"\n## Errors\n\n{_plain(blobstore.errors.__doc__)}\n\n")
    parts += [*_errors(blobstore.BlobStoreError, "")]
    return "".join(parts)


def public_functions() -> dict[str, Any]:
    """Return the functions of ``blobstore`` and of its public modules, by their dotted names."""
    found = {}
    for name in blobstore.__all__:
        value = getattr(blobstore, name)
        if inspect.isfunction(value):
            found[name] = value
        elif inspect.ismodule(value) and value is not blobstore.errors:
            for inner in getattr(value, "__all__", ["import_model"]):
                found[f"{name}.{inner}"] = getattr(value, inner)
    return found


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    texts = map(str, signature.parameters.values())
    lines = [re.sub(r"<.*>", "…", re.sub(r"<(\w+\.\w+): .*>", r"\1", text)) for text in texts]
    kinds = [one.kind for one in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        lines.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    inner = "".join(f"    {line.replace(chr(39), '')},\n" for line in lines)
    return f"{name}(\n{inner}) -> {str(signature.return_annotation).replace(chr(39), '')}"


def returned_classes() -> dict[str, type]:
    """Return the public classes, and those whose values the public functions return, by name."""
    found: dict[str, type] = {}
    for name in blobstore.__all__:
        value = getattr(blobstore, name)
        if inspect.isclass(value) and not issubclass(value, Exception):
            found[name] = value
    for function in public_functions().values():
        names = vars(sys.modules[function.__module__])
        for word in re.findall(r"[A-Z]\w+", str(inspect.signature(function).return_annotation)):
            kind = names.get(word) or getattr(blobstore, word, None)
            if inspect.isclass(kind) and kind.__module__.startswith("blobstore"):
                found[word] = kind
    return dict(sorted(found.items()))


def _attributes(kind: type) -> dict[str, Any]:
    """Return the attributes of our own that a class and its bases define, by name."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if base.__module__.startswith("blobstore"):
            for name, annotation in inspect.get_annotations(base).items():
                found.setdefault(name, annotation)
            found = {**vars(base), **dict.fromkeys(_set_by(base)), **found}
    hidden = ("_", "KEYS")  # the keys of a result in JSON are on their own page
    return {name: value for name, value in sorted(found.items()) if not name.startswith(hidden)}


def _set_by(kind: type) -> list[str]:
    """Return the attributes that a class's constructor sets."""
    made = vars(kind).get("__init__")
    if not inspect.isfunction(made) or "blobstore" not in made.__code__.co_filename:
        return []  # a dataclass's, which has no source
    return re.findall(r"self\.([a-z]\w*)(?:: [^=]+)? = ", inspect.getsource(made))


def _class(name: str, kind: type) -> str:
    rows = {name: _row(name, value) for name, value in _attributes(kind).items()}
    fields = ", ".join(f"`{name}`" for name, row in rows.items() if row is None)
    table = "".join(row for row in rows.values() if row is not None)
    return (
        f"\n### `{name}`\n\n{_plain(kind.__doc__)}\n"
        + (f"\nFields: {fields}.\n" if fields else "")
        + (f"\n| name | |\n|---|---|\n{table}" if table else "")
    )


def _row(name: str, value: Any) -> str | None:
    """Return the row of a method or property; None for a field."""
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    first = _cell(_plain(inspect.getdoc(value)).partition("\n\n")[0])  # perhaps the port's
    if inspect.isfunction(value):
        parameters = [*inspect.signature(value).parameters.values()]
        names = [_parameter(one) for one in parameters if one.name not in ("self", "cls")]
        return f"| `{name}({', '.join(names)})` | {first} |\n"
    if isinstance(value, property) or hasattr(value, "func"):
        return f"| `{name}` | {first} |\n"
    return None


def _parameter(parameter: inspect.Parameter) -> str:
    name = str(parameter).partition(":")[0].partition("=")[0]  # with its stars
    return name if parameter.default is parameter.empty else f"{name}=…"


def _errors(kind: type, indent: str) -> Iterator[str]:
    yield f"{indent}- `{kind.__name__}`: {_cell(_plain(kind.__doc__).partition(chr(10) * 2)[0])}\n"
    children: list[type] = kind.__subclasses__()
    for child in sorted(children, key=lambda one: one.__name__):
        if child.__module__ == kind.__module__:
            yield from _errors(child, indent + "  ")


def _plain(text: str | None) -> str:
    return inspect.cleandoc(text or "").replace("``", "`")


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / f"{name}.md").write_text(text)
