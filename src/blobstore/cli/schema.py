"""``schema``."""

from __future__ import annotations

from typing import Annotated

import typer

from blobstore.cli.output import emit, show_json
from blobstore.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("schema")(schema)


def schema(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND", help="A command that has --json, such as list, or metadata get."
        ),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Print the page of all commands, in Markdown.")
    ] = False,
) -> None:
    """Print the JSON Schema of what a command prints with --json."""
    from blobstore.views import commands

    if page:
        emit(commands.page(), end="")
        return
    if not command:
        raise UsageError(
            "schema needs a COMMAND", hint="blobstore schema --help shows what is possible."
        )
    show_json(commands.schema(" ".join(command)))
