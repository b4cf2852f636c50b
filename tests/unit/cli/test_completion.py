"""Completion: the candidates for the last word, and bash's script run by a real bash."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.commands import Cli
from support.stores import commit_model

from blobstore.cli.completion import FILES, Answer, answers_for, words_of
from blobstore.cli.main import app, run

ROOT: Any = typer.main.get_command(app)
STORED = {None: ["qwen3:int4", "qwen3:int8", "gemma:latest"], "other": ["there:latest"]}
TYPES = ["int4", "int8", "nvfp4", "mxfp4", "mxfp8"]


def answers(line: str) -> list[Answer]:
    return answers_for(ROOT, words_of(line)[1:], lambda store: STORED[store])


@pytest.mark.parametrize(
    ("line", "words", "files"),
    [
        ("blobstore im", ["import"], False),
        ("blobstore show ", ["qwen3:int4", "qwen3:int8", "gemma:latest"], False),
        ("blobstore show q", ["qwen3:int4", "qwen3:int8"], False),
        ("blobstore rm gemma qwen3 -- g", ["gemma:latest"], False),
        ("blobstore show --store=other ", ["there:latest"], False),
        ("blobstore --store other show ", ["there:latest"], False),
        ("blobstore import ", [], True),
        ("blobstore import --quant ", TYPES, False),
        ("blobstore import --quant=mx", ["--quant=mxfp4", "--quant=mxfp8"], False),
        ("blobstore import --policy=", [], True),
        ("blobstore -V metadata ", ["get", "set", "rm"], False),
        ("blobstore show --nonsense=", [], False),
    ],
)
def test_what_a_word_may_be(
    line: str, words: list[str], files: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answers(line)
    assert ([answer[0] for answer in found if answer != FILES], FILES in found) == (words, files)
    assert capsys.readouterr().out == ""  # a shell would take it for an answer


def test_commands_and_options_say_what_they_mean() -> None:
    found = answers("blobstore ")
    assert ("list", "List the models of the store, the newest first.") in found
    assert {"ls", "complete"} & {answer[0] for answer in found} == set()
    assert ("--tensors", "List the tensors as well.") in answers("blobstore show --")


def test_a_store_that_is_unreadable(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["complete", "--", "show", "--store", str(tmp_path / "no"), ""]) == 0
    assert capsys.readouterr() == ("", "")


BASH = {"blobstore show tiny:i": "int4", "blobstore plan x --quant=mxfp4": "mxfp4"}


def test_bash(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readline replaces the text after the last ``:`` or ``=``, so a reply is only that part."""
    for name in ("tiny:int4", "tiny:latest"):
        commit_model(cli.store, name, b"blob")
    (tmp_path / "blobstore").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m blobstore "$@"\n')
    (tmp_path / "blobstore").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script = cli.text("completion", "bash") + (
        'for COMP_LINE in "$@"; do COMP_POINT=${#COMP_LINE};'
        ' _blobstore blobstore; echo "${COMPREPLY[@]}"; done'
    )
    words = ["bash", "--norc", "-c", script, "bash", *BASH]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines(), done.stderr) == ([*BASH.values()], "")
