"""``export``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.importing import Jobs
from blobstore.cli.output import JsonOption, StoreOption, emit, parse_size, printable, show_json, size, store_at
from blobstore.cli.progress import progress_bar

if TYPE_CHECKING:
    from blobstore.export import ExportResult


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("export")(export)


def export(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A stored model.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder to write; it must be new or empty.")],
    form: Annotated[
        str,
        typer.Option("--format", metavar="safetensors|mlx", help="mlx writes a folder that mlx_lm.load opens."),
    ] = "safetensors",
    dequantize: Annotated[
        str | None,
        typer.Option("--dequantize", metavar="bfloat16|float16|float32", help="Write all weights as this type."),
    ] = None,
    max_shard_size: Annotated[
        str,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Largest size of a file, such as 5GB, or source for the same files as were imported.",
        ),
    ] = "5GB",
    verify: Annotated[bool, typer.Option("--verify", help="Hash every blob before using it.")] = False,
    jobs: Jobs = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model as a checkpoint folder. It gets shards and their index, config and tokenizer."""
    from blobstore.export import AS_SOURCE, export_model

    result = export_model(
        name,
        folder,
        store=store_at(store),
        format=form,
        dequantize=dequantize,
        max_shard_size=AS_SOURCE if max_shard_size == AS_SOURCE else parse_size(max_shard_size),
        jobs=jobs,
        verify=verify,
        bar=progress_bar,
    )
    for note in result.notes:
        print(f"Note: {printable(note)}", file=sys.stderr)
    if as_json:
        show_json(_document(result))
    else:
        rate = result.nbytes / max(result.seconds, 1e-3)
        emit(f"{result.name} in {printable(str(result.folder))}: {len(result.files)} files")
        emit(f"{size(result.nbytes)} in {result.seconds:.2f} s, {size(int(rate))}/s")


def _document(result: ExportResult) -> dict[str, Any]:
    return {
        "name": str(result.name),
        "folder": str(result.folder),
        "files": [{"name": name, "size": nbytes} for name, nbytes in result.files.items()],
        "bytes": result.nbytes,
        "notes": list(result.notes),
        "seconds": result.seconds,
    }
