"""``run``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from blobstore.cli.output import JsonOption, StoreOption, emit, printable, show_json, store_at
from blobstore.names import ModelName

_DEFAULT_TOKENS = 128


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("run")(run)


def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A stored model.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Stop after this many tokens.")
    ] = _DEFAULT_TOKENS,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text with a stored model, using mlx-lm."""
    from blobstore import mlx_lm

    full = ModelName.parse(name)
    model, tokenizer = mlx_lm.load(full, store=store_at(store))
    started = time.monotonic()
    pieces = []
    for piece in mlx_lm.continue_text(model, tokenizer, prompt, max_tokens):
        pieces.append(piece)
        if not as_json:
            emit(printable(prompt + piece if len(pieces) == 1 else piece, keep="\n\t"), end="")
    if as_json:
        show_json({"text": "".join(pieces), "tokens": len(pieces), "seconds": time.monotonic() - started})
    else:
        emit()
