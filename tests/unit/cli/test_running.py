"""`run`: where its prompt is from, what it prints, a conversation; with a made-up model."""

import io
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from support.talking import CHAT_TEMPLATE, Letters, Parrot

import blobstore
from blobstore.cli.main import run
from blobstore.cli.running import shown_piece
from blobstore.mlx_lm.prompts import ModelTexts, Prompts
from blobstore.store.hints import Share
from blobstore.views.commands import schema


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


class Runner:
    """Runs commands, in which every name is a model that says "ok"."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = patch, capsys
        self.given: dict[str, Any] = {}
        self.name = "m"
        self.is_model()

    def is_model(self, template: str | None = CHAT_TEMPLATE, **texts: Any) -> None:
        self.parrot = Parrot(texts.get("context"))

        def load(_name: Any, **options: Any) -> Any:
            self.given = options["given"]
            tokenizer: Any = Letters(template)
            self.parrot.prompts = Prompts("m", tokenizer, ModelTexts(**texts), options["is_raw"])
            return self.parrot, ("a parameter is not used",)

        self._patch.setattr("blobstore.mlx_lm.conversation.load_language_model", load)

    def __call__(self, *words: str, stdin: bytes = b"") -> tuple[int, str, str]:
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return run(["run", self.name, *words]), *self._capsys.readouterr()

    def talk(self, *lines: str | type[BaseException]) -> tuple[int, str]:
        waiting = [*lines, EOFError]

        def read(_: str) -> str:
            line = waiting.pop(0)
            if isinstance(line, str):
                return line
            raise line

        shown = Terminal()
        self._patch.setattr("builtins.input", read)
        self._patch.setattr(sys, "stdin", Terminal())
        self._patch.setattr(sys, "stdout", shown)
        return run(["run", "m"]), shown.getvalue()


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


def test_the_prompt_is_the_words(runner: Runner) -> None:
    line = "why is it --temperature 0.5 --top-k 3 --stop a --stop b --system Short"
    assert runner(*line.split()) == (0, "ok\n", "Note: a parameter is not used\n")
    assert runner.parrot.seen == ["# system\nShort\n# user\nwhy is it\n# assistant\n"]
    given = [runner.given[name] for name in ("temperature", "top_k", "stop", "seed")]
    assert given == [0.5, 3, ["a", "b"], None]
    document = json.loads(runner("hi", "--json")[1])
    jsonschema_rs.validate(schema("run"), document)
    assert (document["text"], document["tokens"], document["finish_reason"]) == ("ok", 2, "stop")


def test_the_prompt_is_standard_input(runner: Runner) -> None:
    runner.is_model(None)
    for words in ((), ("-",)):
        assert runner(*words, stdin=b"def f():\n    pass\n")[0] == 0
    assert runner.parrot.seen == ["^def f():\n    pass"] * 2
    for words, stdin, message in (
        ((), b"", "the prompt is empty\nHint: Give"),
        ((), b"ab\xff", "standard input is not UTF-8 at byte 2"),
        (("\udcff",), b"", "prompt"),
    ):
        code, _, err = runner(*words, stdin=stdin)
        assert (code, message in err) == (2, True)


def test_raw_leaves_the_template_out(runner: Runner) -> None:
    runner.is_model(system="S")
    assert "--raw continues the text: the system prompt" in runner("hi", "--raw")[2]
    assert runner.parrot.seen == ["^hi"]


def test_what_a_terminal_would_act_on_is_escaped_there(monkeypatch: pytest.MonkeyPatch) -> None:
    text, escaped = "\x1b[31m\u202e\a👩\u200d💻\n", "\\x1b[31m\\u202e\\x07👩\u200d💻\n"
    for stream, shown in ((Terminal(), escaped), (io.StringIO(), text)):
        monkeypatch.setattr(sys, "stdout", stream)
        assert shown_piece(text) == shown


def test_a_conversation(runner: Runner) -> None:
    assert runner.talk("a", "", "  ", '"""b', 'c"""') == (0, "ok\n\nok\n\n\n")
    assert runner.parrot.seen[1].endswith("# assistant\nok\n# user\nb\nc\n# assistant\n")


def test_commands(runner: Runner) -> None:
    code, shown = runner.talk("a", "/clear", "a", "/?", "/what", "/bye")
    assert (code, "/bye" in shown, "Unknown command /what" in shown) == (0, True, True)
    assert runner.parrot.seen[0] == runner.parrot.seen[1]


def test_a_full_context_does_not_end_it(runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    context = len("# user\na\n# assistant\n") + 1
    runner.is_model(context=context)
    assert runner.talk("x" * 40, "a") == (0, "o\n\n\n")
    said = capsys.readouterr().err
    assert f"the context has {context}" in said
    reason = f"the context of {context} is full, /clear empties it"
    assert f"Note: the answer ended after 1 token: {reason}\n" in said


def test_the_second_ctrl_c_ends(runner: Runner) -> None:
    code, shown = runner.talk(KeyboardInterrupt, "a", KeyboardInterrupt, "/bye")
    assert (code, shown.count("Ctrl-C again")) == (0, 2)
    assert runner.talk(KeyboardInterrupt, KeyboardInterrupt)[0] == 130


def test_ctrl_c_stops_an_answer(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, times = runner.parrot.pieces, 1

    def interrupted(answer: Any) -> Iterator[str]:
        for piece in pieces(answer):
            yield piece
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(runner.parrot, "pieces", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert runner.talk("a", "b") == (0, "o\n\no\n\n\n")
    assert runner.parrot.seen[1] == "# user\na\n# assistant\no\n# user\nb\n# assistant\n"
    assert signal.getsignal(signal.SIGINT) is before
    times = 2
    assert runner.talk("a")[0] == 130


def test_a_checkpoint_is_imported_once(runner: Runner, source: Path, tmp_path: Path) -> None:
    def notes(*words: object) -> list[str]:
        code, out, err = runner("hi", "--store", str(tmp_path / "new"), *map(str, words))
        assert (code, out) == (0, "ok\n"), err
        return [line for line in err.splitlines() if "parameter" not in line]

    runner.name = str(source)
    assert notes()[0].startswith(f"Note: imported as {source.name}:int4: ")
    runner.name = str(source / "model.safetensors")
    assert notes() == []
    assert notes("--quant", "int8")[0].startswith(f"Note: imported as {source.name}:int8: ")
    store, stored = blobstore.open_store(tmp_path / "new"), f"{source.name}:int4"
    blobstore.import_model(source, store=store, quant="int4", method="search")
    assert "with other options, and is used as it is" in notes()[0]
    runner.name = "http://127.0.0.1/m@main"  # a server that can't be reached
    store.shares.add(Share.of_source(runner.name, store.manifests.read(store.find(stored)).digest))
    assert f"{stored} was imported from it" in notes()[0]
    runner.name = str(source.parent / "none")
    assert "no file or folder at" in runner("hi")[2]
    runner.name = "m"
    assert "--quant is for a checkpoint" in runner("hi", "--quant", "int4")[2]
