"""The command line: ``blobstore COMMAND``.

One file a group of commands; only this package reads the environment.

Nothing heavy is imported here or at the top of the command files: ``--help`` and ``list`` answer at
once.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

import blobstore
from blobstore.cli import (
    care,
    comparing,
    completion,
    exporting,
    importing,
    inspecting,
    metadata,
    models,
    schema,
)
from blobstore.cli.import_options import with_flags
from blobstore.cli.output import ReaderGoneError, emit, fail, show_help_without_command
from blobstore.errors import BlobStoreError, UsageError

EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="blobstore",
    help="Store model checkpoints as quantized tensor blobs, in Ollama's format. Start with: blobstore import FOLDER",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (
    importing,
    models,
    inspecting,
    exporting,
    care,
    comparing,
    metadata,
    schema,
    completion,
):
    group.register(app)


def _show_version(wanted: bool) -> None:  # typer calls it with the flag's value
    if wanted:
        from blobstore import kernels

        emit(f"blobstore {blobstore.__version__} (kernels: {kernels.active().name})")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  # acts in its callback
        bool,
        typer.Option(
            "--version",
            help="Show the version and the compute kernels in use.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    show_help_without_command(context)


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong use, 130 interrupted.

    Errors are one line on stderr.
    """
    _open_closed_streams()
    sys.exit(run(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Open /dev/null for closed standard streams: else files of ours would have their numbers, and errors go to stdout."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


@functools.cache
def _command() -> Callable[..., Any]:
    """Return the command line as typer builds it from all signatures, once: that takes 17 ms."""
    return typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a narrow encoding must not fail the command
    try:
        if kernel := os.environ.get("BLOBSTORE_KERNELS"):
            from blobstore import kernels

            kernels.use(kernel)
        code = int(_command()(arguments, prog_name="blobstore", standalone_mode=False) or 0)
    except UsageError as error:
        fail(error.message, with_flags(error.hint or ""))
        return EXIT_WRONG_USE
    except BlobStoreError as error:
        fail(error.message, with_flags(error.hint or ""))
        return EXIT_FAILED
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "blobstore"
        fail(error.format_message(), f"{command} --help shows what is possible.")
        return error.exit_code
    except ReaderGoneError:
        return 0
    if code == EXIT_INTERRUPTED:  # typer's answer to Ctrl-C
        fail("interrupted")
    return code
