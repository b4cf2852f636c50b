"""The README's examples: the console sessions print what the README says, and its Python runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
ANYTHING = "…"


def steps(block: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a console block with the lines that each prints."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A process environment in which ``blobstore`` is ours and the store is empty."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "blobstore").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m blobstore "$@"\n')
    (tools / "blobstore").chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "OLLAMA_MODELS": str(tmp_path / "models"),
    }


def test_console_sessions_print_what_the_readme_says(environment: dict[str, str]) -> None:
    sessions = [block for language, block in BLOCKS if language == "console"]
    assert len(sessions) > 1
    for command, expected in [step for block in sessions for step in steps(block)]:
        done = subprocess.run(  # noqa: S602
            command,
            shell=True,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        printed = (done.stdout + done.stderr).splitlines()
        assert len(printed) == len(expected), done
        assert [
            line for line, wanted in zip(printed, expected, strict=True) if wanted != ANYTHING
        ] == [wanted for wanted in expected if wanted != ANYTHING]


def test_python_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They run in this process, which has loaded mlx-lm for other tests."""
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(block for language, block in BLOCKS if language == "python")
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})  # noqa: S102
    assert capsys.readouterr().out.splitlines() == ["(768, 256) int4 32", "(768, 32)", "(2, 256)"]


def test_each_set_up_command_is_one_line() -> None:
    commands = [block.strip() for language, block in BLOCKS if language == "sh"]
    assert commands
    assert all(
        "\n" not in command and command.startswith("python3 -m venv .venv && ")
        for command in commands
    )
