"""``run``: an answer, or a conversation on a terminal; ``serve``."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import blobstore
from blobstore.cli.output import (
    JsonOption,
    counted,
    emit,
    fail,
    flag_of,
    note,
    parse_size,
    printable,
    say_empty,
    show_json,
    size,
    with_bar,
)
from blobstore.cli.stores import (
    CacheOption,
    CacheSizeOption,
    CaFileOption,
    LowerOption,
    StoreOption,
    source_at,
    stores_at,
)
from blobstore.errors import BlobStoreError, RemoteError, UsageError, needs, quoted
from blobstore.names import ModelName
from blobstore.source.addresses import is_address

if TYPE_CHECKING:
    from blobstore.mlx_lm.conversation import Conversation, Generation, LanguageModel
    from blobstore.mlx_lm.prompts import Prompts


_STDIN = "-"
_WEIGHTS = (".safetensors", ".gguf")
_DEFAULT_QUANT = "int4"
# What a terminal shows well, and Python does not count as printable: the last two join letters, as
# in many emoji.
_KEPT = "\n\t\u200c\u200d"


def run(
    name: Annotated[
        str,
        Argument(
            metavar="NAME",
            help="A stored model; or a checkpoint, such as hf://ORG/NAME, ./FOLDER or"
            " FILE.safetensors, which is imported first.",
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        Argument(
            metavar="PROMPT",
            help="The prompt [default: standard input; on a terminal, a conversation].",
        ),
    ] = None,
    system: Annotated[
        str | None,
        Option(metavar="TEXT", help="System prompt, instead of the model's."),
    ] = None,
    raw: Annotated[
        bool,
        Option("--raw", "--no-template", help="Continue the prompt without a chat template."),
    ] = False,
    temperature: Annotated[
        float | None,
        Option(
            "--temperature", "--temp", metavar="T", help="Sampling temperature; 0: greedy decoding."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        Option(metavar="P", help="Sample from the likeliest tokens that add up to P."),
    ] = None,
    top_k: Annotated[
        int | None,
        Option(metavar="K", help="Sample from the K likeliest tokens; 0: all."),
    ] = None,
    min_p: Annotated[
        float | None,
        Option(metavar="P", help="Sample from tokens at least P times as likely as the best."),
    ] = None,
    repeat_penalty: Annotated[
        float | None,
        Option(metavar="X", help="Penalty for repeated tokens; above 1: less repetition."),
    ] = None,
    seed: Annotated[
        int | None,
        Option(metavar="N", help="Random seed, to repeat an answer [default: a random one]."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        Option(metavar="N", help="Stop after N tokens; -1: no limit."),
    ] = None,
    context: Annotated[
        int | None,
        Option(metavar="N", help="Maximum number of tokens, prompt and answer together."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        Option(metavar="TEXT", help="Text that ends the answer; repeatable."),
    ] = None,
    quant: Annotated[
        str | None,
        Option(
            metavar="TYPE",
            help="Type for a checkpoint, as for import [default: int4, if it is not quantized].",
        ),
    ] = None,
    verbose: Annotated[
        bool, Option("--verbose", help="Show the number of tokens of an answer, and the speed.")
    ] = False,
    cache: CacheOption = None,
    cache_size: CacheSizeOption = None,
    ca_file: CaFileOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt, or hold a conversation."""
    given = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repeat_penalty": repeat_penalty,
        "seed": seed,
        "max_tokens": max_tokens,
        "context": context,
        "stop": stop,
    }
    is_path = name.startswith((".", "/", "~")) or name.endswith(_WEIGHTS)
    is_source = is_address(name) or is_path or ("/" in name and Path(name).exists())
    if quant is not None and not is_source:
        raise UsageError(f"--quant is for a checkpoint, and {name} is the name of a model")
    full = None if is_source else ModelName.parse(name)
    _check(given)
    text = _prompt(prompt, as_json)
    opened = stores_at(
        store, lower, cache=(cache, cache_size), ca_file=ca_file, may_be_new=is_source
    )
    full = full or _import(name, quant, ca_file, opened)
    from blobstore.mlx_lm.conversation import load_language_model

    with loading(str(full)):
        model, notes = load_language_model(full, store=opened, given=given, is_raw=raw)
    note(*notes)
    prompts = model.prompts
    _note_unused(prompts, system)
    if text is None:
        hold_conversation(model, system, verbose)
        return
    messages = [*prompts.first_messages(system), {"role": "user", "content": text}]
    answer = model.answer(prompts.tokens(messages))
    _show(answer, model.seed, as_json)
    if verbose:
        note(figures(answer))


def _import(source: str, quant: str | None, ca_file: str | None, store: Any) -> ModelName:
    """Return the name of a checkpoint's model, which is imported unless it is stored already.

    Raises: as `import_model`.
    """
    from blobstore.importer.options import ImportOptions
    from blobstore.importer.plan import make_plan
    from blobstore.importer.run import imported_from, name_for
    from blobstore.store.ports import id_of
    from blobstore.store.stored_model import StoredModel

    if source.endswith(_WEIGHTS[0]) and Path(source).with_name("config.json").is_file():
        source = str(Path(source).parent)
    try:
        made = with_bar(blobstore.plan_import, source_at(source, ca_file), quant=quant)
    except RemoteError as error:
        if (known := imported_from(source, quant, store)) is None:
            raise
        note(f"{error.message}; {known} was imported from it, and is used as it is")
        return known
    if quant is None and not any(tensor.quantization for tensor in made.tensors):
        made = make_plan(made.inventory, ImportOptions.parse(quant=_DEFAULT_QUANT))
    name = name_for(made, None, force=False)
    before = id_of(store, store.target(name))
    if before is not None:
        stored = StoredModel.find(name, store).provenance
        if stored is None or stored.options != made.options.record:
            note(f"{name} is stored, imported with other options, and is used as it is")
            return name
    result = with_bar(blobstore.run_plan, made, name, store)
    if result.digest != before:
        note(f"imported as {result.name}: {size(result.stored_bytes)}")
    return result.name


def _show(answer: Generation, seed: int | None, as_json: bool) -> None:
    for piece in answer:
        if not as_json:
            emit(shown_piece(piece), end="")
    if as_json:
        from blobstore.views.results import RunAnswer

        show_json(
            RunAnswer(
                text=answer.text,
                tokens=answer.tokens,
                prompt_tokens=answer.prompt_tokens,
                seconds=answer.seconds,
                tokens_per_second=answer.tokens_per_second,
                finish_reason=answer.finish_reason,
                seed=seed,
            )
        )
    else:
        emit()


def _check(given: dict[str, Any]) -> None:
    """Raise UsageError, with its flag, for an invalid option."""
    from blobstore.mlx_lm.sampling_settings import read_field

    for name, value in given.items():
        try:
            if value is not None:
                read_field(name, value, flag_of(name))
        except UsageError as error:
            raise error.about(hint="blobstore run --help shows the usage.") from None


def loading(name: str) -> AbstractContextManager[object]:
    """Say on a terminal that a model is loaded, until it is."""
    from rich.console import Console
    from rich.text import Text

    return Console(stderr=True).status(Text(f"Loading {printable(name)} …"))


def _prompt(words: list[str] | None, as_json: bool) -> str | None:
    """Return the prompt; None for a conversation.

    Raises: UsageError for a prompt that is empty or not UTF-8, and where a conversation is not
    possible.
    """
    from blobstore.mlx_lm.prompts import check_prompt

    if words and words != [_STDIN]:
        text = " ".join(words)
    elif words or not sys.stdin.isatty():
        text = _read_stdin()
    elif as_json or not sys.stdout.isatty():
        reason = "--json prints one document" if as_json else "the output is not a terminal"
        raise UsageError(f"a conversation is not possible: {reason}", hint="Give a PROMPT.")
    else:
        return None
    if not text:
        raise UsageError("the prompt is empty", hint="Give a PROMPT, or pipe text in.")
    check_prompt(text)
    return text


def _read_stdin() -> str:
    """Return the text of standard input, without the newline that ends its last line."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 at byte {error.start}") from None


def _note_unused(prompts: Prompts, system: str | None) -> None:
    texts = prompts.texts
    if prompts.continues and (system or texts.system or texts.messages):
        what = "--raw" if prompts.is_raw else "a model without a template"
        note(f"{what} continues the text: the system prompt and the model's messages are not used")


def shown_piece(piece: str) -> str:
    """Return a piece of an answer; on a terminal, what the terminal would act on is escaped."""
    return printable(piece, keep=_KEPT) if sys.stdout.isatty() else piece


def figures(answer: Generation) -> str:
    """Return how long an answer is, and how fast."""
    speed = answer.tokens_per_second
    rate = "" if speed is None else f", {speed:.1f} tokens/s"
    return (
        f"{answer.prompt_tokens:,} prompt tokens, {answer.tokens:,} answer tokens, "
        f"{answer.seconds:.2f} s{rate}; ended by: {answer.finish_reason}"
    )


_PROMPT = ">>> "
_MORE = "... "
# The terminal that knows no sequences: of Emacs, expect, and others.
_DUMB = "dumb"
_QUOTES = '"""'
_HELP = """\
  /clear          clear the conversation
  /bye            end (also Ctrl-D)
  /?              this help
  \"\"\"             begin and end a message of several lines
  Ctrl-C          stop the answer; twice: end"""


def hold_conversation(model: LanguageModel, system: str | None, is_verbose: bool) -> None:
    """Hold a conversation until ``/bye`` or Ctrl-D.

    Raises: KeyboardInterrupt for a second Ctrl-C.
    """
    from blobstore.mlx_lm.conversation import Conversation

    signal.set_wakeup_fd(-1)  # Ctrl-C stops an answer, and no longer ends the process
    _edit_lines()
    conversation = Conversation(model, system)
    if model.prompts.continues:
        why = "--raw uses no template" if model.prompts.is_raw else "The model has no chat template"
        emit(f"{why}: it continues what you type. /? shows help.")
    for text in _messages(conversation):
        try:
            _answer(conversation, text, model.sampling.context, is_verbose)
        except BlobStoreError as error:
            fail(error.message, error.hint)


def _edit_lines() -> None:
    """Let `input` edit lines and remember them, where Python has readline."""
    try:
        import readline
    except ImportError:
        return
    if os.environ.get("TERM", _DUMB) == _DUMB:
        return  # it would show the sequences around a paste
    readline.parse_and_bind("set enable-bracketed-paste on")


def _messages(conversation: Conversation) -> Iterator[str]:
    """Yield what is written, except for commands, which are carried out."""
    was_interrupted = False
    while True:
        try:
            text = _read()
        except EOFError:
            emit()
            return
        except KeyboardInterrupt:
            emit()
            if was_interrupted:
                raise
            was_interrupted = True
            emit("Press Ctrl-C again or Ctrl-D, or type /bye, to end.")
            continue
        was_interrupted = False
        if not text.strip():
            continue
        command = text.strip().lower()
        if command in ("/bye", "/exit", "/quit"):
            return
        if text.startswith("/") and "\n" not in text:
            _carry_out(command, conversation)
        else:
            yield text


def _carry_out(command: str, conversation: Conversation) -> None:
    if command == "/clear":
        conversation.clear()
        emit("The conversation was cleared.")
    elif command in ("/?", "/help"):
        emit(_HELP)
    else:
        emit(f"Unknown command {shown_piece(command.split(maxsplit=1)[0])}. /? shows help.")


def _read() -> str:
    """Return a message: a line, or the lines between triple quotes.

    Raises: EOFError, KeyboardInterrupt.
    """
    line = input(_PROMPT)
    if not line.startswith(_QUOTES):
        return line
    lines = [line.removeprefix(_QUOTES)]
    while not lines[-1].rstrip().endswith(_QUOTES):
        lines.append(input(_MORE))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return "\n".join(lines)


def _answer(conversation: Conversation, text: str, context: int | None, is_verbose: bool) -> None:
    answer = conversation.say(text)
    if conversation.dropped:
        note(f"the context is full: the {conversation.dropped} oldest messages are left out")
    with _stop_on_interrupt(answer):
        for piece in answer:
            emit(shown_piece(piece), end="")
    if not answer.text.endswith("\n"):
        emit()
    emit()
    if answer.finish_reason == "length":
        why = "--max-tokens allows more"
        if context is not None and answer.prompt_tokens + answer.tokens >= context:
            why = f"the context of {context:,} is full, /clear empties it"
        note(f"the answer ended after {counted(answer.tokens, 'token')}: {why}")
    if is_verbose:
        note(figures(answer))


@contextmanager
def _stop_on_interrupt(answer: Generation) -> Iterator[None]:
    """Let the first Ctrl-C stop an answer, and the second raise KeyboardInterrupt."""

    def handle(number: int, frame: Any) -> None:
        if answer.is_stopped:
            signal.default_int_handler(number, frame)
        answer.stop()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        sys.stdout.flush()


# A host's name, or its address; one of IPv6 has two colons at least.
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]?", re.ASCII)
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@]+/?", re.ASCII)


def serve(
    port: Annotated[
        int, Option(metavar="N", min=0, max=65535, help="Port to listen on; 0: any free port.")
    ] = 8080,
    host: Annotated[str, Option(metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    allowed_host: Annotated[
        list[str] | None,
        Option(
            metavar="HOST",
            help="A host name of the server, for browsers on other machines; repeatable.",
        ),
    ] = None,
    lm: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Serve a stored model to OpenAI clients at /v1/ (with mlx-lm); repeatable.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="Unload models while their weights are larger together, such as 8GB.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        Option(
            metavar="KEY",
            help="Clients of /v1/ must send this key [env: BLOBSTORE_API_KEY].",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        Option(
            metavar="ORIGIN",
            help="A site whose pages may use /v1/, or * for all; repeatable.",
        ),
    ] = None,
    plan: Annotated[
        str | None,
        Option(
            metavar="SOURCE",
            help="Show on a page what an import of SOURCE would write; only headers are read.",
        ),
    ] = None,
    ca_file: CaFileOption = None,
    log: Annotated[
        bool | None,
        Option("--log/--no-log", help="Print a line for each request [default: on a terminal]."),
    ] = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    cache: CacheOption = None,
    cache_size: CacheSizeOption = None,
) -> None:
    """Serve web pages and an API of the store. Nothing can be changed."""
    _check_names(allowed_host or (), allow_origin or ())
    only_lm = {"--allow-origin": allow_origin, "--memory": memory, "--api-key": api_key}
    if not lm and (unused := [flag for flag, given in only_lm.items() if given is not None]):
        raise UsageError(f"{unused[0]} needs a model to serve", hint="Use --lm NAME.")
    if api_key == "":
        raise UsageError("--api-key is empty", hint="Leave it out to serve without a key.")
    opened = stores_at(store, lower, cache=(cache, cache_size), ca_file=ca_file)
    with needs("web", "starlette and uvicorn are not installed"):
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    from blobstore.web.application import Hosts, application, check_address, serve_at
    from blobstore.web.distribution import distribution_routes
    from blobstore.web.report import plan_document

    def show(address: str) -> None:
        lines = [f"Serving {opened.address} at {address}"]
        if lm:
            lines.append(f"Serving {', '.join(lm)} at {address}v1 (OpenAI API)")
        emit("\n".join(lines))  # at once: a reader may leave after the first line
        if not opened.manifests.names():
            say_empty(opened.address)

    hosts = Hosts(host, allowed_host or ())
    with ExitStack() as stack:
        more = distribution_routes(opened)
        if lm:
            check_address(host, port)  # before a model is loaded
            from blobstore.mlx_lm.chat_service import load_service
            from blobstore.web.chat import Chat

            limit = {} if memory is None else {"memory": parse_size(memory)}
            with loading(lm[0]):
                service = load_service(lm, store=opened, note=note, **limit)
            stack.enter_context(closing(service))
            key = api_key or os.environ.get("BLOBSTORE_API_KEY") or None
            more = [*more, Chat(service, allow_origin or (), key).route()]
        made = plan and with_bar(blobstore.plan_import, source_at(plan, ca_file))
        app = application(opened, hosts, more=more, plan=made and plan_document(made, made.options))
        serve_at(app, host, port, ready=show, log=sys.stderr.isatty() if log is None else log)


def _check_names(hosts: Iterable[str], origins: Iterable[str]) -> None:
    """Raise UsageError for names that no request could ever have."""
    for flag, names, pattern, what, hint in (
        ("--allowed-host", hosts, _HOST, "a host name", "without scheme and port"),
        ("--allow-origin", origins, _ORIGIN, "an origin", "as SCHEME://HOST[:PORT], or * for all"),
    ):
        for name in names:
            if pattern.fullmatch(name) is None:
                raise UsageError(f"{flag}: {quoted(name)} is not {what}", hint=f"Write it {hint}.")
