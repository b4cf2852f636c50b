"""The README and the guides: their code runs and prints what they say, and links lead somewhere.

A page's blocks run in order, in a fresh folder with the fixtures: ``console`` commands, ``python``,
and files (```` ```toml models.toml ````). ``sh`` is for the set-up, ``text`` for what needs the
outside world. ``…`` stands for any text, and on a line of its own for any lines.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from support import ROOT

from blobstore.cli.main import run

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs" / "guides").glob("*.md"))]
LINKED = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: it has the fixtures, and ``blobstore`` is ours for the shell too."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "blobstore").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m blobstore "$@"\n')
    (tools / "blobstore").chmod(0o755)
    here = tmp_path / "here"
    here.mkdir()
    (here / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(here / "models"))
    return here


def output_of(command: str, capture: pytest.CaptureFixture[str]) -> str:
    settings, found, words = command.partition("blobstore ")
    if found and not set("|<>&;$") & set(command):
        variables = dict(word.split("=", 1) for word in settings.split())
        with patch.dict(os.environ, variables):
            code = run(shlex.split(words))
        printed = "".join(capture.readouterr())
    else:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)  # noqa: S602
        code, printed = done.returncode, done.stdout + done.stderr
    assert code in (0, 3) or "Error" in printed, printed
    return printed.strip("\n")


def pattern(expected: str) -> str:
    lines = [
        r"(?:.*\n)*" if line == "…" else re.escape(line).replace("…", ".*") + "\n"
        for line in expected.splitlines()
    ]
    # A machine that is slow may take minutes for what was just now.
    return "".join(lines).replace(re.escape("just now"), r"(?:just now|\d+ \w+ ago)")


def run_console(block: str, capture: pytest.CaptureFixture[str]) -> None:
    for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, expected = step.partition("\n")
        printed = output_of(command, capture)
        text = printed + "\n" if printed else ""
        assert re.fullmatch(pattern(expected), text), f"$ {command}\n{printed}"


def run_python(block: str, names: dict[str, object], capture: pytest.CaptureFixture[str]) -> None:
    """Run code; each line that it prints is in the comment after that print."""
    exec(compile(block, "<page>", "exec"), names)  # noqa: S102
    said = re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)
    printed = capture.readouterr().out.splitlines()
    assert [pair for pair in zip(printed, said, strict=True) if pair[0] not in pair[1]] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_does_as_said(page: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for language, file, block in FENCE.findall(page.read_text()):
        if file:
            (folder / file).write_text(block)
        elif language == "console":
            run_console(block, capfd)
        elif language == "python":
            run_python(block, names, capfd)
        else:
            assert language == "text" or (language == "sh" and page == README)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as hosting sites make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for page in LINKED:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(\s*(?!https?:)([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.name}: {link}")
    assert broken == []
