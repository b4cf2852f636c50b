"""The command line: ``blobstore COMMAND``.

One file a group of commands; only this package reads the environment.

Nothing heavy is imported here or at the top of the command files: ``--help`` and ``list`` answer at
once.
"""

from __future__ import annotations

import atexit
import functools
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from blobstore._version import __version__
from blobstore.cli.interruption import let_commands_end
from blobstore.cli.output import ReaderGoneError, emit, fail, show_json
from blobstore.cli.parsing import commands, group
from blobstore.errors import BlobStoreError, UsageError

EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130
_ALLOCATIONS = 200_000
"""Between searches for cyclic garbage. Commands make almost none, but many objects that live on,
which Python would search every 700 allocations."""


def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        emit(context.get_help())


_PLACES = {
    "import": "conversion:import_",
    "plan": "conversion:plan",
    "work": "working:work",
    "commit": "working:commit",
    "list": "models:list_",
    "show": "models:show",
    "rm": "models:rm",
    "cp": "models:cp",
    "mv": "models:mv",
    "push": "sharing:push",
    "pull": "sharing:pull",
    "inspect": "inspecting:inspect",
    "run": "running:run",
    "serve": "serving:serve",
    "export": "conversion:export",
    "save": "archives:save",
    "load": "archives:load",
    "verify": "care:verify",
    "sign": "signing:sign",
    "repair": "care:repair",
    "prune": "care:prune",
    "quality": "comparing:quality",
    "du": "care:du",
    "pack": "sharing:pack",
    "unpack": "sharing:unpack",
    "diff": "comparing:diff",
    "report": "reporting:report",
    "login": "accounts:login",
    "logout": "accounts:logout",
    "schema": "main:schema",
    "completion": "completion:completion",
}
"""The commands, and their functions in the modules of this room, in the order of the help."""
_HIDDEN = {"ls": "models:list_", "complete": "completion:complete"}
_METADATA = {
    "get": "inspecting:get_metadata",
    "set": "inspecting:set_metadata",
    "rm": "inspecting:remove_metadata",
}


def _metadata() -> Any:
    metadata = typer.Typer(
        name="metadata",
        help="Read and edit the metadata of a .safetensors file.",
        callback=_show_help,
        add_completion=False,
        cls=group(commands(_METADATA)),
        **_SETTINGS,
    )
    return typer.main.get_command(metadata)


_SETTINGS: dict[str, Any] = {"invoke_without_command": True, "rich_markup_mode": None}

app = typer.Typer(
    name="blobstore",
    help="Store model checkpoints as quantized tensor blobs, in Ollama's format. "
    "Start with: blobstore import FOLDER",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    cls=group({**commands(_PLACES), "metadata": _metadata, **commands(_HIDDEN, hidden=True)}),
    **_SETTINGS,
)


def _show_version(wanted: bool) -> None:  # typer calls it with the flag's value
    if wanted:
        from blobstore import hashing, kernels

        here = f"kernels: {kernels.active().name}; SHA-256: {hashing.in_use()}"
        emit(f"blobstore {__version__} ({here})")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  # acts in its callback
        bool,
        typer.Option(
            "--version",
            help="Show the version, the compute kernels and the SHA-256 in use.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    _show_help(context)


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
    elif command:
        show_json(commands.schema(" ".join(command)))
    else:
        hint = "blobstore schema --help shows what is possible."
        raise UsageError("schema needs a COMMAND", hint=hint)


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong use, 130 interrupted.

    Errors are one line on stderr.
    """
    _open_closed_streams()
    let_commands_end()
    gc.set_threshold(_ALLOCATIONS)
    # NumPy's library of linear algebra starts a thread for each core when it is loaded. Nothing
    # here multiplies matrices with NumPy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _end(run(sys.argv[1:]))


def _end(code: int) -> NoReturn:
    """End the process, whose output is written and whose files are closed.

    Python would first free its modules one by one, for a sixth of the time of a small import; the
    system frees them at once. What another thread or an exit function has to do still is done.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the rest without a traceback
    if threading.active_count() > 1:
        sys.exit(code)
    atexit._run_exitfuncs()  # noqa: SLF001  # Python has no public name for it
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)  # Python reports it
    os._exit(code)


def _open_closed_streams() -> None:
    """Open /dev/null for closed standard streams.

    Otherwise files of ours would get their numbers, and errors would go to stdout.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


@functools.cache
def _command() -> Callable[..., Any]:
    """Return the command line as typer builds it, once."""
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
        if method := os.environ.get("BLOBSTORE_SHA256"):
            from blobstore import hashing

            hashing.use_method(method)
        code = int(_command()(arguments, prog_name="blobstore", standalone_mode=False) or 0)
    except UsageError as error:
        fail(error.message, error.hint)
        return EXIT_WRONG_USE
    except BlobStoreError as error:
        fail(error.message, error.hint)
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
