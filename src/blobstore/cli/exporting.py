"""``export`` and ``run``."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from blobstore.cli.output import (
    Jobs,
    JsonOption,
    LowerOption,
    StoreOption,
    emit,
    parse_size,
    printable,
    progress_bar,
    show_json,
    size,
    stores_at,
)
from blobstore.names import ModelName

_DEFAULT_TOKENS = 128


def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A stored model.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Stop after this many tokens.")
    ] = _DEFAULT_TOKENS,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text with a stored model, using mlx-lm."""
    from blobstore import mlx_lm

    full = ModelName.parse(name)
    model, tokenizer = mlx_lm.load(full, store=stores_at(store, lower))
    started = time.monotonic()
    pieces = []
    for piece in mlx_lm.continue_text(model, tokenizer, prompt, max_tokens):
        pieces.append(piece)
        if not as_json:
            emit(printable(prompt + piece if len(pieces) == 1 else piece, keep="\n\t"), end="")
    if as_json:
        from blobstore.views.importing import RunView

        show_json(
            RunView(text="".join(pieces), tokens=len(pieces), seconds=time.monotonic() - started)
        )
    else:
        emit()


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("run")(run)
    app.command("export")(export)


def export(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A stored model.")],
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="The folder to write; it must be new or empty.")
    ],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="safetensors|mlx",
            help="mlx writes a folder that mlx_lm.load opens.",
        ),
    ] = "safetensors",
    dequantize: Annotated[
        str | None,
        typer.Option(
            "--dequantize",
            metavar="bfloat16|float16|float32",
            help="Write all weights as this type.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Largest size of a file, such as 5GB, or source for the same files as were imported.",
        ),
    ] = "5GB",
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every blob before using it.")
    ] = False,
    jobs: Jobs = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model as a checkpoint folder.

    It gets shards and their index, config and tokenizer.
    """
    from blobstore.export.options import AS_SOURCE
    from blobstore.export.run import export_model

    with progress_bar() as progress:
        result = export_model(
            name,
            folder,
            store=stores_at(store, lower),
            format=form,
            dequantize=dequantize,
            max_shard_size=AS_SOURCE if max_shard_size == AS_SOURCE else parse_size(max_shard_size),
            jobs=jobs,
            verify=verify,
            progress=progress,
        )
    for note in result.notes:
        print(f"Note: {printable(note)}", file=sys.stderr)
    if as_json:
        from blobstore.views.importing import ExportView

        show_json(ExportView.of(result))
    else:
        rate = result.nbytes / max(result.seconds, 1e-3)
        emit(f"{result.name} in {printable(str(result.folder))}: {len(result.files)} files")
        emit(f"{size(result.nbytes)} in {result.seconds:.2f} s, {size(int(rate))}/s")
