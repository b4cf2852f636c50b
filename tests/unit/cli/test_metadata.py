"""``metadata get``, ``set`` and ``rm`` as a person uses them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import safetensors_bytes

from blobstore.cli.main import run


class Cli:
    """Runs ``metadata`` commands on one file."""

    def __init__(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Begin with a file that has one key."""
        self.file = file
        self._capsys = capsys
        file.write_bytes(safetensors_bytes({"x": np.zeros(9, np.uint8)}, {"format": "pt"}))

    def __call__(self, action: str, *arguments: str, code: int = 0) -> str:
        """Return what a command prints on stdout, or, when it shall fail, on stderr."""
        assert run(["metadata", action, str(self.file), *arguments]) == code
        output = self._capsys.readouterr()
        assert (output.out if code else output.err) == ""
        return output.err if code else output.out

    def map(self) -> Any:
        """Return what ``get --json`` prints."""
        return json.loads(self("get", "--json"))


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Commands on a new file."""
    return Cli(tmp_path / "m.safetensors", capsys)


def test_get_all_and_one(cli: Cli) -> None:
    cli("set", "long key", "two\nlines")
    assert cli("get") == "format     pt\nlong key   two\\nlines\n"
    assert cli("get", "long key") == "two\nlines\n"
    assert json.loads(cli("get", "long key", "--json")) == "two\nlines"
    assert cli.map() == {"format": "pt", "long key": "two\nlines"}


def test_get_what_is_not_there(cli: Cli) -> None:
    assert cli("get", "nope", code=1) == f"Error: {cli.file} has no metadata 'nope'\n"
    cli("rm", "format")
    assert (cli("get"), cli.map()) == ("", {})


def test_set_says_what_it_did(cli: Cli) -> None:
    assert cli("set", "k", "v" * 90).startswith(f"Wrote {cli.file} anew: 9 B in ")
    assert cli("set", "k", "w") == f"Edited {cli.file} in place\n"
    assert cli("set", "k", "w") == f"{cli.file} has these metadata already\n"
    assert json.loads(cli("set", "k", "x", "--json")) == {"format": "pt", "k": "x"}


def test_set_from_json(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(cli("set", "--json", '{"k": "ü", "format": "np"}')) == {
        "format": "np",
        "k": "ü",
    }
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b' {"only": "this"}\n')))
    cli("set", "-", "--replace")
    assert cli.map() == {"only": "this"}
    cli("set", "-", "a key of one dash")
    assert cli("get", "-") == "a key of one dash\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["k"], 2, "the value for 'k' is missing"),
        (['{"k": 1}'], 2, "the value of 'k' is not a string"),
        (['{"k": "a", "k": "b"}'], 1, "twice"),
        (['{"k": "\\ud800"}'], 1, "surrogate"),
        (['{"k"'], 1, "not valid JSON"),
        (["k", "\udc80"], 2, "UTF-8"),
        (["k", "v" * 200, "--in-place"], 2, "no room"),
    ],
)
def test_set_refuses(cli: Cli, arguments: list[str], code: int, says: str) -> None:
    before = cli.file.read_bytes()
    error = cli("set", *arguments, code=code)
    assert error.startswith("Error: ")
    assert says in error
    assert cli.file.read_bytes() == before


def test_rm(cli: Cli) -> None:
    cli("set", '{"a": "1", "b": "2", "c": "3"}')
    cli("rm", "b", "format")
    assert cli.map() == {"a": "1", "c": "3"}
    assert "no metadata 'b'" in cli("rm", "a", "b", code=1)
    assert cli.map() == {"a": "1", "c": "3"}
    assert "--all" in cli("rm", code=2)
    assert "--all" in cli("rm", "a", "--all", code=2)
    assert json.loads(cli("rm", "--all", "--json")) == {}


def test_hostile_text_is_printed_escaped_and_exact_as_json(cli: Cli) -> None:
    hostile = "\x1b[31mred\u202eleft\x07\r" + "x" * 100_000
    cli("set", hostile[:20], hostile)
    text = cli("get")
    assert "\\x1b[31mred\\u202eleft\\x07" in text
    assert all(
        character.isprintable() or character == "\n"
        for character in text + cli("get", hostile[:20])
    )
    assert cli.map()[hostile[:20]] == hostile
    assert "\x1b" not in cli("get", "\x1b", code=1)
