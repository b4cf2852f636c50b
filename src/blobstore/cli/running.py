"""``run``: an answer of a stored model, or a conversation with it on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.buckets import CacheOption, CacheSizeOption, cached_stores_at
from blobstore.cli.output import (
    JsonOption,
    LowerOption,
    Model,
    StoreOption,
    emit,
    flags_of,
    note,
    printable,
    show_json,
)
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.mlx_lm.conversation import Generation
    from blobstore.mlx_lm.prompts import Prompts

_STDIN = "-"
_KEPT = "\n\t\u200c\u200d"
"""What a terminal shows well, and Python does not count as printable: the last two join letters, as
in many emoji."""

Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "--temp", metavar="T", help="0 takes the most likely token."),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Only tokens that together are so likely."),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", metavar="K", help="Only the K likeliest tokens; 0: all.")
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="Only tokens P times as likely as the likeliest."),
]
RepeatPenalty = Annotated[
    float | None,
    typer.Option("--repeat-penalty", metavar="X", help="Above 1: repeat less."),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="For the same text again [default: a random one]."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", help="Stop after N tokens; -1: no limit."),
]
Context = Annotated[
    int | None,
    typer.Option("--context", metavar="N", help="Tokens of prompt and answer together."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="A text that ends the answer; repeatable."),
]


def run(
    name: Model,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="The text to answer [default: standard input, on a terminal a conversation].",
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="The system text, in place of the model's."),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", "--no-template", help="Continue the text, without a template."),
    ] = False,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repeat_penalty: RepeatPenalty = None,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    context: Context = None,
    stop: Stop = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Say how many tokens an answer has, and how fast.")
    ] = False,
    cache: CacheOption = None,
    cache_size: CacheSizeOption = None,
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
    from blobstore.names import ModelName

    full = ModelName.parse(name)
    _check(given)
    text = _prompt(prompt, as_json=as_json)
    opened = cached_stores_at(store, lower, cache, cache_size)
    model, prompts, notes = _loaded(full, opened, given, is_raw=raw)
    for one in notes:
        note(one)
    _note_unused(prompts, system)
    if text is None:
        from blobstore.cli.dialogue import hold_conversation

        hold_conversation(model, prompts, system, is_verbose=verbose)
        return
    messages = [*prompts.beginning(system), {"role": "user", "content": text}]
    answer = model.answer(prompts.tokens(messages))
    _show(answer, model.sampling.seed, as_json=as_json)
    if verbose:
        note(figures(answer))


def _show(answer: Generation, seed: int | None, *, as_json: bool) -> None:
    """Print an answer as it is written; as a document when it is whole."""
    for piece in answer:
        if not as_json:
            emit(shown_piece(piece), end="")
    if as_json:
        from blobstore.views.stores import RunView

        show_json(RunView.of(answer, seed))
    else:
        emit()


def _check(given: dict[str, Any]) -> None:
    """Raise UsageError, with its flag, for an invalid option."""
    from blobstore.mlx_lm.sampling_settings import read_field

    hint = "blobstore run --help shows what is possible."
    for name, value in given.items():
        try:
            if value is not None:
                read_field(name, value, flags_of(name)[0])
        except UsageError as error:
            raise UsageError(error.message, hint=hint) from None


def _loaded(name: Any, store: Any, given: dict[str, Any], *, is_raw: bool) -> Any:
    """Return what `load_language_model` returns."""
    from blobstore.mlx_lm.conversation import load_language_model

    with loading(str(name)):
        return load_language_model(name, store=store, given=given, is_raw=is_raw)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Say on a terminal that a model is loaded, until it is."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"Loading {printable(name)} …", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _prompt(words: list[str] | None, *, as_json: bool) -> str | None:
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
        reason = "--json has one document" if as_json else "the output is not a terminal"
        raise UsageError(f"a conversation is not possible: {reason}", hint="Give a PROMPT.")
    else:
        return None
    if not text:
        raise UsageError("the prompt is empty", hint="Give a PROMPT, or a text as standard input.")
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
    """Note texts that have no place without a template."""
    texts = prompts.texts
    if prompts.continues and (system or texts.system or texts.messages):
        what = "--raw" if prompts.is_raw else "a model without a template"
        note(f"{what} continues the text: the system text and the model's messages are not used")


def shown_piece(piece: str) -> str:
    """Return a piece of an answer; on a terminal, what the terminal would act on is escaped."""
    return printable(piece, keep=_KEPT) if sys.stdout.isatty() else piece


def figures(answer: Generation) -> str:
    """Return how long an answer is, and how fast it came."""
    speed = answer.tokens_per_second
    rate = "" if speed is None else f", {speed:.1f} tokens/s"
    return (
        f"{answer.prompt_tokens:,} tokens of prompt, {answer.tokens:,} of answer, "
        f"{answer.seconds:.2f} s{rate}; ended by: {answer.finish_reason}"
    )
