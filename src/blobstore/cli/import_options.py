"""The options of an import as options of a command.

Those that decide are made from the table in importer/policies/, those that carry out are here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args, get_type_hints

import typer

from blobstore.cli.output import flags_of, parse_size
from blobstore.importer.policies.arguments import ImportArguments, Option

Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Memory for the work [default: 32MB, and 32MB per thread].",
    ),
]
Connections = Annotated[
    int | None,
    typer.Option(
        "--connections",
        metavar="N",
        min=1,
        help="Requests at once to the source's server [default: 8].",
    ),
]
LimitRate = Annotated[
    str | None,
    typer.Option(
        "--limit-rate", metavar="SIZE", help="Bytes a second to fetch at most, such as 20MB."
    ),
]
VerifyReuse = Annotated[
    bool,
    typer.Option(
        "--verify-reuse", help="Hash the blobs of earlier imports before using them again."
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Allow a tag that says another type, such as :int4 for int8 weights."
    ),
]
Planned = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="Carry out a plan that plan -o wrote; SOURCE is where it is now.",
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ADDRESS",
        help="Let the workers of a Dask cluster make the blobs: dask://HOST:PORT (extra: dask).",
    ),
]
CopyUp = Annotated[
    bool, typer.Option("--copy-up", help="Write all blobs, also those that a lower store has.")
]

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
