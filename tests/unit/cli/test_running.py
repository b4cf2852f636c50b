"""`run`: where its prompt is from, what it prints, a conversation; with a made-up model.

tests/oracle/test_answers.py compares the answers of real models.
"""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.talking import CHAT_TEMPLATE, Letters, Parrot

from blobstore.cli.main import run
from blobstore.cli.running import shown_piece
from blobstore.mlx_lm.prompts import ModelTexts, Prompts
from blobstore.views.commands import schema
from blobstore.views.documents import check

Given = dict[str, Any]


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Parrot, Given]]:
    """Let every name be a model that says "ok"; returns it, and the options that it was given."""

    def made(template: str | None = CHAT_TEMPLATE, **texts: Any) -> tuple[Parrot, Given]:
        parrot = Parrot(texts.get("context"))
        given: Given = {}

        def load(name: Any, **options: Any) -> Any:
            given.update(options["given"], name=str(name))
            prompts = Prompts("m", Letters(template), ModelTexts(**texts), options["is_raw"])
            return parrot, prompts, ("a parameter is not used",)

        monkeypatch.setattr("blobstore.mlx_lm.conversation.load_language_model", load)
        return parrot, given

    return made


def give(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_the_prompt_is_the_words(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parrot, given = model()
    line = "run m why is it --temperature 0.5 --top-k 3 --stop a --stop b --system Short"
    assert run(line.split()) == 0
    printed = capsys.readouterr()
    assert printed.out == "ok\n"
    assert printed.err == "Note: a parameter is not used\n"
    assert parrot.seen == ["# system\nShort\n# user\nwhy is it\n# assistant\n"]
    assert (given["temperature"], given["top_k"], given["stop"]) == (0.5, 3, ["a", "b"])
    assert given["seed"] is None


def test_the_prompt_is_standard_input(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parrot, _ = model(None)
    for words in (["run", "m"], ["run", "m", "-"]):
        give(monkeypatch, b"def f():\n    pass\n")
        assert run(words) == 0
    assert parrot.seen == ["^def f():\n    pass"] * 2


def test_a_terminal_shows_that_a_model_is_loaded(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model()
    for stream, said in ((Terminal(), "Loading m:latest …\r\x1b[K"), (io.StringIO(), "")):
        monkeypatch.setattr(sys, "stderr", stream)
        assert run(["run", "m", "hi"]) == 0
        assert stream.getvalue() == f"{said}Note: a parameter is not used\n"


def test_raw_leaves_the_template_out(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parrot, _ = model(system="S")
    assert run(["run", "m", "hi", "--raw"]) == 0
    assert parrot.seen == ["^hi"]
    assert "--raw continues the text: the system text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the prompt is empty\nHint: Give"),
        (b"ab\xff", "standard input is not UTF-8 at byte 2"),
    ],
)
def test_what_is_not_a_prompt_is_wrong_use(
    data: bytes,
    message: str,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model()
    give(monkeypatch, data)
    assert run(["run", "m"]) == 2
    assert message in capsys.readouterr().err
    assert run(["run", "m", "\udcff"]) == 2
    assert "prompt" in capsys.readouterr().err


def test_one_document(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model()
    assert run(["run", "m", "hi", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check(document, schema("run"), {})
    assert (document["text"], document["tokens"], document["finish_reason"]) == ("ok", 2, "stop")


def test_a_conversation_needs_a_terminal(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model()
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert run(["run", "m", "--json"]) == 2
    assert run(["run", "m"]) == 2
    printed = capsys.readouterr().err
    assert "--json prints one document" in printed
    assert "the output is not a terminal" in printed


def test_what_a_terminal_would_act_on_is_escaped_there(monkeypatch: pytest.MonkeyPatch) -> None:
    text, escaped = "\x1b[31m\u202e\a👩\u200d💻\n", "\\x1b[31m\\u202e\\x07👩\u200d💻\n"
    for stream, shown in ((Terminal(), escaped), (io.StringIO(), text)):
        monkeypatch.setattr(sys, "stdout", stream)
        assert shown_piece(text) == shown


def talked(
    monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException], **texts: Any
) -> tuple[int, str, Parrot]:
    """Return the exit code, the output and the model of a conversation."""
    waiting = list(lines)

    def read(_: str) -> str:
        line = waiting.pop(0) if waiting else EOFError
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    parrot = texts.pop("parrot")
    return run(["run", "m"]), shown.getvalue(), parrot


def test_a_conversation(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parrot, _ = model()
    code, shown, _ = talked(monkeypatch, "a", "", "  ", '"""b', 'c"""', parrot=parrot)
    assert code == 0
    assert shown == "ok\n\nok\n\n\n"
    assert parrot.seen[1].endswith("# assistant\nok\n# user\nb\nc\n# assistant\n")


def test_commands(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parrot, _ = model()
    code, shown, _ = talked(monkeypatch, "a", "/clear", "a", "/?", "/what", "/bye", parrot=parrot)
    assert code == 0
    assert parrot.seen[0] == parrot.seen[1]
    assert "/bye" in shown
    assert "Unknown command /what" in shown


def test_an_error_does_not_end_a_conversation(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot, _ = model(context=40)
    code, shown, _ = talked(monkeypatch, "x" * 40, "a", parrot=parrot)
    assert (code, shown) == (0, "ok\n\n\n")
    assert "the context has 40" in capsys.readouterr().err


def test_an_answer_that_fills_the_context_says_so(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context = len("# user\na\n# assistant\n") + 1
    parrot, _ = model(context=context)
    _, shown, _ = talked(monkeypatch, "a", parrot=parrot)
    assert shown == "o\n\n\n"
    reason = f"the context of {context} is full, /clear empties it"
    assert f"Note: the answer ended after 1 token: {reason}\n" in capsys.readouterr().err


def test_the_second_ctrl_c_ends(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parrot, _ = model()
    once = talked(monkeypatch, KeyboardInterrupt, "a", KeyboardInterrupt, "/bye", parrot=parrot)
    assert once[0] == 0
    assert once[1].count("Ctrl-C again") == 2
    assert talked(monkeypatch, KeyboardInterrupt, KeyboardInterrupt, parrot=parrot)[0] == 130


def test_ctrl_c_stops_an_answer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parrot, _ = model()
    pieces, times = parrot.pieces, 1

    def interrupted(answer: Any) -> Iterator[str]:
        for piece in pieces(answer):
            yield piece
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(parrot, "pieces", interrupted)
    before = signal.getsignal(signal.SIGINT)
    code, shown, _ = talked(monkeypatch, "a", "b", parrot=parrot)
    assert (code, shown) == (0, "o\n\no\n\n\n")
    assert signal.getsignal(signal.SIGINT) is before
    times = 2
    assert talked(monkeypatch, "a", parrot=parrot)[0] == 130
