"""How the process of a command ends, and the headings of the help."""

from __future__ import annotations

import subprocess
import sys

import pytest

from blobstore.cli.main import run


def test_the_help_shows_the_commands_under_headings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    sections = capsys.readouterr().out.split("\n\n")[3:]
    commands = {text.split(":")[0]: text.split("\n")[1].split()[0] for text in sections}
    assert commands == {
        "Models": "import",
        "Checkpoints and quality": "inspect",
        "Sharing": "push",
        "Care": "verify",
        "Many machines": "work",
        "Scripts": "schema",
    }


def ended(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    before = f"import sys; sys.argv = ['blobstore', *{list(words)!r}]; {code}\n"
    code = f"{before}\nfrom blobstore.cli.main import main\nmain()\nprint('not reached')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("words", "code"), [(["schema", "rm"], 0), (["nope"], 2)])
def test_the_exit_code_and_the_output_are_complete(words: list[str], code: int) -> None:
    done = ended("sys.stdout.write('before '); sys.stderr.write('first ')", *words)
    assert done.returncode == code
    assert done.stdout.startswith("before ")
    assert done.stderr.startswith("first ")
    assert "not reached" not in done.stdout
