"""The options of an import as flags, from their table (arguments.py); coverage as text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from blobstore.cli.output import counted, emit, parse_size, printable
from blobstore.importer.policies.arguments import ImportArguments, Option

if TYPE_CHECKING:
    from blobstore.formats.coverage import Coverage, LeftOut, Tally


_MOST_NAMES = 5


def show_coverage(coverage: Coverage) -> None:
    """Print what is stored of a source, and in lines of their own what is special about it."""
    for line in coverage_lines(coverage):
        emit(printable(line))


def coverage_lines(coverage: Coverage) -> list[str]:
    """Return lines: how much is stored, counted apart, derived, and left out for which reason."""
    from blobstore.formats.coverage import by_reason

    lines = [f"{_share(coverage.tensors, 'tensor')} and {_share(coverage.files, 'file')} stored"]
    if coverage.tensors.source is None:
        lines.append(
            "The source is not known: the model was not imported by blobstore in its default "
            "profile"
        )
    lines += [
        f"{count:,} of the tensors belong to the {head}" for head, count in coverage.heads.items()
    ]
    derived = {**coverage.tensors.derived, **coverage.files.derived}
    lines += [f"Derived: {count:,} {how}" for how, count in derived.items()]
    if coverage.kept_whole:
        lines.append(f"Kept as files, not quantized: {_names(coverage.kept_whole)}")
    for why, group in by_reason(coverage.left_out).items():
        lines.append(f"Left out: {_names([_named(one) for one in group])}: {why}")
    return lines


def _share(tally: Tally, noun: str) -> str:
    if tally.source is None:
        return counted(tally.covered, noun)
    return f"{tally.covered:,} of {counted(tally.source, noun)}"


def _named(one: LeftOut) -> str:
    return one.name if one.count == 1 else f"{one.name} ({one.count:,})"


def _names(names: list[str] | tuple[str, ...]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES:,} more"


_FLAGS = {
    "rules": ("--rule",),
    "alignment": ("--align",),
    "modelfile": ("--modelfile", "-f"),
    "licenses": ("--license",),
    "parameters": ("--param",),
}
"""The flags of options whose flags are not just their names."""
_TYPES: dict[Any, Any] = {
    **{kind: kind for kind in (bool, int | None, float | None)},
    Sequence[str]: list[str] | None,
}
"""What a command line makes of a value's type; of all others a text."""
_NAMED = re.compile(r"""(?<!\S)([a-z_]+)=(?:True|"([^"]*)"|([A-Z]+))(?=[\s,.;]|$)""")
"""An option as hints of the library name it: ``quant="int4"``, ``force=True``, ``draft=DIR``."""


def flags_of(name: str) -> tuple[str, ...]:
    """Return the flags of the option of that Python name."""
    return _FLAGS.get(name, (f"--{name.replace('_', '-')}",))


def with_flags(hint: str) -> str:
    """Return a hint of the library with flags for the options that it names."""
    return _NAMED.sub(
        lambda named: " ".join([flags_of(named[1])[0], *filter(None, named.groups()[1:])]), hint
    )


def takes_import_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command, whose ``**options`` typer now sees as the options of an import."""
    own = inspect.signature(command, eval_str=True)
    *named, _ = own.parameters.values()
    options = [
        _parameter(name, *get_args(hint))
        for name, hint in get_type_hints(ImportArguments, include_extras=True).items()
    ]
    ordered = sorted([*options, *named], key=lambda one: one.kind)
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
