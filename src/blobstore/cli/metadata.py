"""``metadata get``, ``set`` and ``rm``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from blobstore.cli.output import (
    JsonOption,
    emit,
    printable,
    progress_bar,
    show_facts,
    show_help_without_command,
    show_json,
    size,
)
from blobstore.errors import NotFoundError, UsageError, quoted

if TYPE_CHECKING:
    from blobstore.inspection.metadata import MetadataEdit


_STDIN = "-"
_MOST_INPUT = 100_000_000

File = Annotated[str, typer.Argument(metavar="FILE", help="A .safetensors file.")]
InPlace = Annotated[
    bool,
    typer.Option(
        "--in-place",
        help="Fail instead of writing a new file if the header has no room for the change.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    group = typer.Typer(
        rich_markup_mode=None,
        help="Read and edit the metadata of a .safetensors file.",
        invoke_without_command=True,
        callback=show_help_without_command,
    )
    group.command("get")(get)
    group.command("set")(set_)
    group.command("rm")(rm)
    app.add_typer(group, name="metadata")


def get(
    file: File,
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="One key [default: all of them].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show all metadata, or the value of one key."""
    from blobstore.inspection.metadata import read_metadata

    metadata = read_metadata(file)
    if key is None:
        _show(metadata, as_json=as_json)
        return
    if key not in metadata:
        raise NotFoundError(f"{file} has no metadata {quoted(key)}", path=file)
    if as_json:
        show_json(metadata[key])
    else:
        emit(printable(metadata[key], keep="\n\t"))


def set_(
    file: File,
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY_OR_JSON",
            help="A key; without VALUE, a JSON object, or - to read one from stdin.",
        ),
    ],
    value: Annotated[str | None, typer.Argument(metavar="VALUE", help="The new value.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Remove all other keys.")] = False,
    in_place: InPlace = False,
    as_json: JsonOption = False,
) -> None:
    """Set one key, or those of a JSON object of texts."""
    changes: Mapping[str, str | None] = _parse(key) if value is None else {key: value}
    _edit(file, changes, replace=replace, in_place=in_place, as_json=as_json)


def rm(
    file: File,
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY", help="Keys to remove; if one is missing, nothing changes."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every key.")] = False,
    in_place: InPlace = False,
    as_json: JsonOption = False,
) -> None:
    """Remove keys."""
    if bool(keys) == everything:
        raise UsageError("name the keys to remove, or say --all")
    _edit(file, dict.fromkeys(keys or ()), replace=everything, in_place=in_place, as_json=as_json)


def _parse(text: str) -> dict[str, str | None]:
    from blobstore.formats.strictjson import parse_object
    from blobstore.io.durable import os_errors

    if text == _STDIN:
        with os_errors("read", "standard input"):
            raw = sys.stdin.buffer.read(_MOST_INPUT + 1)
    elif text.lstrip().startswith("{"):
        raw = text.encode(errors="surrogatepass")
    else:
        raise UsageError(
            f"there is no value for {quoted(text)}",
            hint="Give KEY and VALUE, a JSON object, or - for stdin.",
        )
    value = parse_object(raw, "the metadata", rule="F9", limit=_MOST_INPUT)
    if wrong := [key for key, item in value.items() if not isinstance(item, str)]:
        raise UsageError(f"the value of {quoted(wrong[0])} is not a string", rule="F9")
    return value


def _edit(
    file: str, changes: Mapping[str, str | None], *, replace: bool, in_place: bool, as_json: bool
) -> None:
    from blobstore.inspection.metadata import edit_metadata

    with progress_bar() as progress:
        edit = edit_metadata(file, changes, replace=replace, in_place=in_place, progress=progress)
    if as_json:
        _show(edit.metadata, as_json=True)
    else:
        emit(_said(file, edit))


def _said(file: str, edit: MetadataEdit) -> str:
    name = printable(file)
    if edit.copied_bytes is None:
        return f"Edited {name} in place" if edit.changed else f"{name} has these metadata already"
    rate = edit.copied_bytes / max(edit.seconds, 1e-3)
    return (
        f"Wrote {name} anew: {size(edit.copied_bytes)} in {edit.seconds:.2f} s, {size(int(rate))}/s"
    )


def _show(metadata: Mapping[str, str], *, as_json: bool) -> None:
    if as_json:
        show_json(dict(metadata))
    elif metadata:
        show_facts({printable(key): value for key, value in metadata.items()})
