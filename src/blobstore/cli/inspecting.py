"""``inspect``, and ``metadata get``, ``set`` and ``rm``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from blobstore.cli.output import (
    PLAIN,
    JsonOption,
    count,
    cut,
    emit,
    printable,
    progress_bar,
    rate,
    shape,
    shortened,
    show_facts,
    show_help,
    show_json,
    show_table,
    size,
)
from blobstore.cli.parsing import LightCommand
from blobstore.cli.stores import (
    LowerOption,
    StoreOption,
    bucket_options,
    hub_endpoint,
    stores_at,
    token_for,
)
from blobstore.errors import NotFoundError, UsageError, quoted

if TYPE_CHECKING:
    from blobstore.inspection.counting import LogicalTensor
    from blobstore.inspection.inspection import Branch, Inspection
    from blobstore.inspection.metadata import MetadataEdit


_LONGEST_NAME = 96
_LONGEST_VALUE = 120
_LARGE_VALUE = 2000
_MOST_VALUES = 40
_MOST_TYPES = 3
_INDENT = "  "
_STDIN = "-"
_MOST_INPUT = 100_000_000
File = Annotated[str, typer.Argument(metavar="FILE", help="A .safetensors file.")]
InPlace = Annotated[
    bool,
    typer.Option("--in-place", help="Fail if the change can't be made without a new file."),
]


metadata = typer.Typer(
    help="Read and edit the metadata of a .safetensors file.", callback=show_help, **PLAIN
)


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A .safetensors file, a folder, a shard index, an address, "
            "hf://ORG/NAME[@REVISION][/PATH], or a stored model.",
        ),
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors.")] = False,
    tree: Annotated[
        bool,
        typer.Option("--tree", help="Show the modules as a tree, with identical ones on one line."),
    ] = False,
    depth: Annotated[
        int | None,
        typer.Option("--depth", metavar="N", min=1, help="Levels of --tree [default: all]."),
    ] = None,
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="GLOB",
            help="Count and show only tensors whose names match. Repeatable.",
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            "--sort",
            metavar="file|name|size|parameters",
            help="Order of --tensors; by size and parameters the largest first.",
        ),
    ] = "file",
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint holds. It may be local or remote: only headers are read."""
    from blobstore.inspection.inspect import inspect_at

    if sort not in _ORDERS:
        raise UsageError(f"unknown order {sort!r}", hint=f"Use one of: {', '.join(_ORDERS)}.")
    endpoint = hub_endpoint()
    everything = inspect_at(
        target,
        lambda: stores_at(store, lower, may_be_new=True),
        token=token_for(target, endpoint),
        bucket_options=bucket_options(target),
        endpoint=endpoint,
    )
    found = everything.only(filters) if filters else everything
    if as_json:
        show_json(found, compact=True)
        return
    _show(found, len(everything.tensors))
    if tensors:
        emit()
        _show_tensors(found, sort)
    if tree:
        emit()
        _show_tree(found, depth)


def _show(found: Inspection, of: int) -> None:
    from blobstore.inspection.inspection import MODELSPEC

    by_type: dict[str, int] = {}
    for tensor in found.tensors:
        by_type[tensor.type_name] = by_type.get(tensor.type_name, 0) + tensor.parameters
    facts = {
        "name": cut(found.name, _LONGEST_VALUE),
        "kind": found.kind.value,
        "files": f"{len(found.files):,}",
        "tensors": f"{len(found.tensors):,}" + (f" of {of:,}" if len(found.tensors) != of else ""),
        "parameters": f"{count(found.parameters)} ({found.parameters:,})",
        "dtypes": _counts(found.parameter_count),
        "types": _counts(by_type) if found.quantizations else "",
        "size": size(found.nbytes),
        "bits per weight": "" if found.bits_per_weight is None else f"{found.bits_per_weight:.2f}",
    }
    show_facts({key: value for key, value in facts.items() if value})
    _show_quantizations(found)
    modelspec = found.modelspec
    _show_values("MODELSPEC", modelspec)
    others = {key: value for key, value in found.metadata.items() if not key.startswith(MODELSPEC)}
    _show_values("METADATA", others)
    if found.notes:
        emit()
    for note in found.notes:
        emit(f"Note: {printable(note)}")


def _counts(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count(number)}" for name, number in ordered if number)


def _show_quantizations(found: Inspection) -> None:
    rows = [
        (
            one.type,
            f"{one.bits:g}",
            "" if one.group_size is None else str(one.group_size),
            one.format,
            f"{one.tensors:,}",
            count(one.parameters),
        )
        for one in found.quantizations
    ]
    if rows:
        emit()
        show_table(("QUANTIZATION", "BITS", "GROUP", "FORMAT", "TENSORS", "PARAMETERS"), rows)


def _show_values(heading: str, values: Mapping[str, str]) -> None:
    """Show keys and values.

    Long values are cut, and of large ones, such as pictures, only the size is shown.
    """
    if not values:
        return
    rows = [
        (cut(key, _LONGEST_NAME), _value(value))
        for key, value in list(values.items())[:_MOST_VALUES]
    ]
    if len(values) > _MOST_VALUES:
        rows.append((f"and {len(values) - _MOST_VALUES:,} more", ""))
    emit()
    show_table((heading, "VALUE"), rows)


def _value(text: str) -> str:
    return (
        f"({size(len(text.encode()))})" if len(text) > _LARGE_VALUE else cut(text, _LONGEST_VALUE)
    )


def _show_tensors(found: Inspection, sort: str) -> None:
    in_files = len(found.files) > 1
    headings = ("TENSOR", "TYPE", "SHAPE", "PARAMETERS", "SIZE", *(("FILE",) if in_files else ()))
    rows = []
    for tensor in _ORDERS[sort](found.tensors):
        row = (
            cut(tensor.name, _LONGEST_NAME),
            tensor.type_name,
            cut(shape(tensor.shape), _LONGEST_NAME),
            f"{tensor.parameters:,}",
            size(tensor.nbytes),
        )
        rows.append((*row, cut(tensor.file, _LONGEST_NAME)) if in_files else row)
    show_table(headings, rows)


def _natural(tensor: LogicalTensor) -> tuple[list[tuple[int, int | str]], str]:
    """Return a key that sorts layer 2 before layer 10."""
    parts = re.split(r"([0-9]{1,18})", tensor.name)
    return [
        (0, int(part)) if index % 2 else (1, part) for index, part in enumerate(parts)
    ], tensor.name


_ORDERS: Mapping[str, Callable[[Iterable[LogicalTensor]], Iterable[LogicalTensor]]] = {
    "file": lambda tensors: tensors,
    "name": lambda tensors: sorted(tensors, key=_natural),
    "size": lambda tensors: sorted(tensors, key=lambda tensor: -tensor.nbytes),
    "parameters": lambda tensors: sorted(tensors, key=lambda tensor: -tensor.parameters),
}


def _show_tree(found: Inspection, depth: int | None) -> None:
    from blobstore.inspection.inspection import tree_of

    rows = [_branch_row(branch) for branch in tree_of(found.tensors, depth)]
    show_table(("MODULE", "TYPE", "SHAPE", "PARAMETERS", "SIZE"), rows)


def _branch_row(branch: Branch) -> tuple[str, ...]:
    alike = f" ({branch.alike:,} alike)" if branch.alike > 1 else ""
    return (
        f"{_INDENT * branch.depth}{cut(branch.name, _LONGEST_NAME)}{alike}",
        shortened([kind for kind, _ in branch.types], _MOST_TYPES),
        "" if branch.shape is None else cut(shape(branch.shape), _LONGEST_NAME),
        count(branch.parameters),
        size(branch.nbytes),
    )


@metadata.command("get", cls=LightCommand)
def get_metadata(
    file: File,
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="One key [default: all of them].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show all metadata, or the value of one key."""
    from blobstore.inspection.metadata import read_metadata

    values = read_metadata(file)
    if key is None:
        _show_metadata(values, as_json=as_json)
    elif key not in values:
        raise NotFoundError(f"{file} has no metadata {quoted(key)}", path=file)
    elif as_json:
        show_json(values[key])
    else:
        emit(printable(values[key], keep="\n\t"))


@metadata.command("set", cls=LightCommand)
def set_metadata(
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


@metadata.command("rm", cls=LightCommand)
def remove_metadata(
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
            f"the value for {quoted(text)} is missing",
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
        _show_metadata(edit.metadata, as_json=True)
    else:
        emit(_said(file, edit))


def _said(file: str, edit: MetadataEdit) -> str:
    name = printable(file)
    if edit.copied_bytes is None:
        return f"Edited {name} in place" if edit.changed else f"{name} has these metadata already"
    took = f"{edit.seconds:.2f} s, {rate(edit.copied_bytes, edit.seconds)}"
    return f"Wrote {name} anew: {size(edit.copied_bytes)} in {took}"


def _show_metadata(values: Mapping[str, str], *, as_json: bool) -> None:
    if as_json:
        show_json(dict(values))
    elif values:
        show_facts({printable(key): value for key, value in values.items()})
