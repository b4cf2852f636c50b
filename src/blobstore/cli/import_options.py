"""The options of an import as options of a command: from the table in importer/policies/."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args, get_type_hints

import typer

from blobstore.cli.output import flags_of, parse_size
from blobstore.importer.policies.arguments import ImportArguments, Option

# What a command line makes of a value's type; of all others a text.
_TYPES: dict[Any, Any] = {kind: kind for kind in (bool, int | None, float | None)}
_TYPES[Sequence[str]] = list[str] | None


def takes_import_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command, whose ``**options`` typer now sees as the options of an import."""
    own = inspect.signature(command, eval_str=True)
    *named, _ = own.parameters.values()
    ordered = sorted([*_OPTIONS, *named], key=lambda one: one.kind)
    command.__signature__ = own.replace(parameters=ordered)  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    return command


def _parameter(name: str, kind: Any, option: Option) -> inspect.Parameter:
    """Return the parameter of a command for an option of the table."""
    parse = parse_size if name == "target_size" else None
    flags = typer.Option(*flags_of(name), metavar=option.metavar, help=option.help, parser=parse)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if kind is bool else None,
        annotation=Annotated[_TYPES.get(kind, str | None), flags],
    )


_OPTIONS = [
    _parameter(name, *get_args(hint))
    for name, hint in get_type_hints(ImportArguments, include_extras=True).items()
]
