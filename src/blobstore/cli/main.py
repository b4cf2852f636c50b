"""The command line: ``blobstore COMMAND``.

One file a group of commands; only this package reads the environment.

Nothing heavy is imported here or at the top of the command files: ``--help`` and ``list`` answer at
once. A command is built when it is used, from a module that is loaded then.
"""

import gc
import importlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from threading import Thread
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from blobstore._version import __version__
from blobstore.cli.output import PLAIN, ReaderGoneError, emit, fail, show_help, show_json
from blobstore.cli.stores import StoreOption
from blobstore.errors import BlobStoreError, UsageError

EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130
# Between searches for cyclic garbage. Commands make almost none, but many objects that live on,
# which Python would search every 700 allocations.
_ALLOCATIONS = 200_000
# The largest block that, when it is freed, makes glibc keep blocks of that size for the next use
# instead of taking fresh pages each time (mallopt(3), M_MMAP_THRESHOLD).
_KEPT = 2**25 - 2**16
GRACE_S = 5.0
"""How long an interrupted command has to end by itself."""


def schema(
    command: Annotated[
        list[str] | None,
        Argument(
            metavar="COMMAND", help="A command that has --json, such as list, or metadata get."
        ),
    ] = None,
    page: Annotated[
        bool, Option("--page", help="Print one page about all commands, in Markdown.")
    ] = False,
) -> None:
    """Print the JSON Schema of what a command prints with --json."""
    from blobstore.views import commands

    if page:
        emit(commands.page(), end="")
    elif command:
        show_json(commands.schema(" ".join(command)))
    else:
        raise UsageError("schema needs a COMMAND", hint="blobstore schema --help shows the usage.")


HEADINGS = {
    "Models": {
        "import": "importing:import_",
        "plan": "importing:plan",
        "list": "models:list_",
        "show": "models:show",
        "run": "running:run",
        "export": "files:export",
        "cp": "models:cp",
        "mv": "models:mv",
        "rm": "models:rm",
    },
    "Checkpoints and quality": {
        "inspect": "inspecting:inspect",
        "quality": "inspecting:quality",
        "diff": "inspecting:diff",
        "report": "inspecting:report",
        "metadata": "files:metadata",
    },
    "Sharing": {
        "push": "sharing:push",
        "pull": "sharing:pull",
        "save": "files:save",
        "load": "files:load",
        "sign": "sharing:sign",
        "serve": "running:serve",
        "login": "sharing:login",
        "logout": "sharing:logout",
    },
    "Care": {
        "verify": "care:verify",
        "repair": "care:repair",
        "prune": "care:prune",
        "du": "care:du",
        "pack": "care:pack",
        "unpack": "care:unpack",
    },
    "Many machines": {"work": "importing:work", "commit": "importing:commit"},
    "Scripts": {"schema": "main:schema", "completion": "completion:completion"},
}
"""The commands by the headings of the help, in its order, and their functions in this room."""
# The words of other programs for our commands.
_MEANT = {
    "import": "add build convert create download quantize",
    "list": "cache image images list-tags models ps scan-cache search",
    "show": "cat history info manifest",
    "run": "chat generate",
    "mv": "rename",
    "cp": "copy tag",
    "rm": "delete remove rmi uninstall",
    "push": "upload",
    "login": "auth signin",
    "serve": "start",
    "verify": "check fsck",
    "prune": "clean gc",
    "du": "df size system",
    "--version": "version",
}
# Commands that use what an interrupted run of theirs left.
_CONTINUES = frozenset(("import", "work", "pull", "push", "cp", "load", "pack", "unpack"))
_HIDDEN = {"ls": "models:list_", "complete": "completion:complete"}
_PLACES = {
    name: place for places in (*HEADINGS.values(), _HIDDEN) for name, place in places.items()
}


class _Coercion:
    """How typer reads the values of options, but for texts and options that are not given.

    typer reads every value with a validator of pydantic, which takes half of the time before
    ``import`` begins. These two need none.
    """

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        described = param.type_descriptor
        is_text = described.annotation in (str, list[str])
        if value is None or (is_text and described.parameter_info.parser is None):
            return value
        return type(param).get_runtime_param(param).coerce(value, param=param, ctx=ctx)


def _without_validators(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        parameter.get_runtime_param = _Coercion
    return parameters


class LightCommand(TyperCommand):
    """A command whose options cost nothing if they are not given."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_validators(super().get_params(ctx))


@cache
def _command(name: str) -> Any:
    module, _, function = _PLACES[name].partition(":")
    command = getattr(importlib.import_module(f"blobstore.cli.{module}"), function)
    if isinstance(command, typer.Typer):
        return typer.main.get_command(command)
    app = typer.Typer(**PLAIN)
    app.command(name, cls=LightCommand, hidden=name in _HIDDEN)(command)
    return typer.main.get_command(app)


class _Group(TyperGroup):
    """The commands under their headings, in plain text."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(_PLACES)  # type: ignore[assignment]  # made by get_command

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_validators(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  # typer passes it
        return _command(cmd_name) if cmd_name in _PLACES else None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for meant, words in _MEANT.items():
            if args[0] in words.split():
                raise UsageError(f"no command {args[0]!r}", hint=f"Use blobstore {meant}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  # typer passes it
        width = max(len(name) for names in HEADINGS.values() for name in names)
        for heading, names in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    (
                        name.ljust(width),
                        _command(name).get_short_help_str(200),
                    )
                    for name in names
                )


app = typer.Typer(
    name="blobstore",
    help="Store model checkpoints as quantized tensor blobs, in Ollama's format. "
    "Start with: blobstore import FOLDER",
    context_settings={"help_option_names": ["-h", "--help"]},
    cls=_Group,
    epilog="blobstore help COMMAND, or blobstore COMMAND --help, shows how a command is used.",
    **PLAIN,
)


def _show_version(context: typer.Context, wanted: bool) -> None:  # typer gives the flag's value
    if wanted and not context.resilient_parsing:  # of completions
        from blobstore import hashing, kernels

        emit(
            f"blobstore {__version__} "
            f"(kernels: {kernels.active().name}; SHA-256: {hashing.in_use()})"
        )
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  # acts in its callback
        bool,
        Option(
            "--version",
            "-V",
            help="Show the version, the compute kernels and the SHA-256 in use.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
    store: StoreOption = None,
) -> None:
    context.default_map = {name: {"store": store} for name in _PLACES}
    show_help(context)


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong use, 130 interrupted.

    Errors are one line on stderr.
    """
    _open_closed_streams()
    end_soon_when_interrupted()
    gc.set_threshold(_ALLOCATIONS)
    bytearray(_KEPT)  # and freed, untouched
    # NumPy's library of linear algebra starts a thread for each core when it is loaded. What
    # multiplies matrices here has threads already.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    code = run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the rest without a traceback
    gc.freeze()  # Python need not search the objects of the modules for cycles before it ends
    sys.exit(code)


def end_soon_when_interrupted() -> None:
    """From now on let Ctrl-C end this process within five seconds, by a kill if need be.

    A request of obstore may take more than a minute to give up, and Python learns of Ctrl-C when
    its main thread is back from native code. So the signal also wakes a thread, through a pipe.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    Thread(target=_end_when_interrupted, args=(reads,), daemon=True).start()


def _end_when_interrupted(signals: int) -> None:
    while (
        signal.SIGINT not in os.read(signals, 1)
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        pass
    time.sleep(GRACE_S)
    _fail_interrupted(sys.argv[1:])
    os._exit(EXIT_INTERRUPTED)


def _open_closed_streams() -> None:
    """Open /dev/null for closed standard streams.

    Otherwise files of ours would get their numbers, and errors would go to stdout.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


@cache
def _command_line() -> Callable[..., Any]:
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
        code = int(_command_line()(arguments, prog_name="blobstore", standalone_mode=False) or 0)
    except BlobStoreError as error:
        fail(error.message, error.hint)
        return EXIT_WRONG_USE if isinstance(error, UsageError) else EXIT_FAILED
    except typer.TyperException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "blobstore")
        hint = f"{command} --help shows the usage."
        if command == "blobstore serve" and "extra argument" in error.message:
            hint = f"To serve a model, use --lm NAME. {hint}"
        fail(error.format_message(), hint)
        return error.exit_code
    except ReaderGoneError:
        return 0
    if code == EXIT_INTERRUPTED:  # typer's answer to Ctrl-C
        _fail_interrupted(arguments)
    return code


def _fail_interrupted(arguments: list[str]) -> None:
    command = next((word for word in arguments if word in _PLACES), None)
    fail("interrupted" + ("; the same command continues" if command in _CONTINUES else ""))
