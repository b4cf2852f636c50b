"""Values that are read without a validator are those that typer's validators would give."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated, Any

import pytest
import typer

from blobstore.cli.main import LightCommand, app

GROUP: Any = typer.main.get_group(app)


def command_of(function: Any, *, is_plain: bool) -> Any:
    own = typer.Typer(add_completion=False, rich_markup_mode=None)
    own.command("it", cls=LightCommand if is_plain else None)(function)
    return typer.main.get_command(own)


def answer(function: Any, words: list[str], *, is_plain: bool) -> object:
    """Return what a function is called with, or the message and the exit code of the refusal."""
    command = command_of(function, is_plain=is_plain)
    try:
        return command(words, standalone_mode=False)
    except typer.TyperException as error:
        return error.format_message(), error.exit_code


def given(
    name: Annotated[str, typer.Argument()],
    others: Annotated[list[str] | None, typer.Argument()] = None,
    *,
    text: str | None = None,
    texts: Annotated[list[str] | None, typer.Option("--texts")] = None,
    number: int | None = None,
    positive: Annotated[float | None, typer.Option(min=0)] = None,
    flag: bool = False,
    parsed: Annotated[str | None, typer.Option(parser=len)] = None,
    with_default: str = "default",
) -> list[object]:
    return [name, others, text, texts, number, positive, flag, parsed, with_default]


@pytest.mark.parametrize(
    "words",
    [
        "a",
        "a b c",
        "a --text x --texts y --texts z --with-default w",
        "a --number 5 --positive 2.5 --flag --parsed four",
        "a --number five",
        "a --positive -1",
        "a --positive nan",
        "",
        "a --text",
        "a --unknown",
        "--help",
    ],
)
def test_values_and_messages_are_typers(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(given, words.split(), is_plain=True)
    printed = capsys.readouterr()
    assert plain == answer(given, words.split(), is_plain=False)
    assert printed == capsys.readouterr()


def test_a_text_is_not_changed() -> None:
    odd = " \udcff\n"
    assert answer(given, [odd], is_plain=True) == [odd, *[None] * 5, False, None, "default"]


def test_a_command_is_built_once_and_when_it_is_asked_for() -> None:
    code = (
        "import sys; from blobstore.cli.main import run; run(['list', '--store', '/nowhere']);"
        "print([name for name in ('care', 'inspecting', 'completion')"
        " if f'blobstore.cli.{name}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert GROUP.get_command(None, "show") is GROUP.get_command(None, "show")
    assert "nothing" not in GROUP.commands
