"""A conversation on a terminal: lines are read, answers printed as they are written."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from blobstore.cli.interruption import heed_interrupts
from blobstore.cli.output import counted, emit, fail, note
from blobstore.cli.running import figures, shown_piece
from blobstore.errors import BlobStoreError

if TYPE_CHECKING:
    from blobstore.mlx_lm.conversation import Conversation, Generation, LanguageModel
    from blobstore.mlx_lm.prompts import Prompts

_PROMPT = ">>> "
_MORE = "... "
_DUMB = "dumb"
"""The terminal that knows no sequences: of Emacs, expect, and others."""
_QUOTES = '"""'
_HELP = """\
  /clear          forget the conversation
  /bye            end (also Ctrl-D)
  /?              this help
  \"\"\"             begin and end a message of several lines
  Ctrl-C          stop the answer; twice: end"""


def hold_conversation(
    model: LanguageModel, prompts: Prompts, system: str | None, *, is_verbose: bool
) -> None:
    """Hold a conversation until ``/bye`` or Ctrl-D.

    Raises: KeyboardInterrupt for a second Ctrl-C.
    """
    from blobstore.mlx_lm.conversation import Conversation

    heed_interrupts()
    _edit_lines()
    conversation = Conversation(model, prompts, system)
    if prompts.continues:
        why = "--raw uses no template" if prompts.is_raw else "The model has no chat template"
        emit(f"{why}: it continues what you write. /? shows help.")
    for text in _messages(conversation):
        try:
            _answer(conversation, text, model.sampling.context, is_verbose=is_verbose)
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
            emit("Ctrl-C again, Ctrl-D or /bye ends.")
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
        emit("The conversation is forgotten.")
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


def _answer(
    conversation: Conversation, text: str, context: int | None, *, is_verbose: bool
) -> None:
    answer = conversation.say(text)
    if conversation.dropped:
        note(f"the context is full: the {conversation.dropped} oldest messages are left out")
    with _stopping(answer):
        for piece in answer:
            emit(shown_piece(piece), end="")
    if not answer.text.endswith("\n"):
        emit()
    emit()
    if answer.finish_reason == "length":
        note(f"the answer ended after {counted(answer.tokens, 'token')}: {_limit(answer, context)}")
    if is_verbose:
        note(figures(answer))


def _limit(answer: Generation, context: int | None) -> str:
    """Return what ended an answer that the model did not end."""
    if context is not None and answer.prompt_tokens + answer.tokens >= context:
        return f"the context of {context:,} is full, /clear empties it"
    return "--max-tokens allows more"


@contextmanager
def _stopping(answer: Generation) -> Iterator[None]:
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
