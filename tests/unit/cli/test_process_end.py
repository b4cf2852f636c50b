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


def test_exit_functions_run() -> None:
    done = ended("import atexit; atexit.register(print, 'at the end')", "completion", "bash")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "at the end")


def test_another_thread_ends_first() -> None:
    wait = "threading.main_thread().join()"  # until Python begins to shut down
    code = f"import threading; threading.Thread(target=lambda: ({wait}, print('late'))).start()"
    done = ended(code, "completion", "bash")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "late")
