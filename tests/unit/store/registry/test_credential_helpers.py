"""Credential helpers: the protocol, and programs that break it. Their output is never shown."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from support.corpus import refusal

from blobstore.errors import AuthenticationError, NotFoundError, StorageError, UsageError
from blobstore.store.registry.logins import MAX_OUTPUT, CredentialHelper, Login, Secret

HIDDEN = "swordfish-55e0"
NOT_FOUND = "echo credentials not found in native keychain; exit 1"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the PATH begins with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def helper(programs: Path, script: str, timeout_s: float = 60) -> CredentialHelper:
    program = programs / "docker-credential-lab"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return CredentialHelper("lab", "credsStore of FILE", timeout_s)


def says(text: str) -> str:
    return f"cat >/dev/null; printf '%s' '{text}'"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (says('{"Username":"bob","Secret":"s"}'), Login("bob", Secret("s"))),
        (says('{"ServerURL":"h","Username":"<token>","Secret":"s"}'), Login(None, Secret("s"))),
        (says('{"Username":"","Secret":""}'), None),
        ('printf \'%s\' \'{"Username":"bob","Secret":"s"}\'', Login("bob", Secret("s"))),
        (NOT_FOUND, None),
        (
            """read -r key; printf '{"Username":"%s","Secret":"%s"}' "$1" "$key" """,
            Login("get", Secret("ghcr.io")),
        ),
    ],
)
def test_what_a_program_answers(programs: Path, script: str, expected: Login | None) -> None:
    assert helper(programs, script).get("ghcr.io") == expected


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (f"echo '{HIDDEN}'; exit 3", "fails for h (exit code 3)"),
        (f"echo '{HIDDEN}'", "invalid JSON object"),
        (says(f'{{"Username":1,"Secret":"{HIDDEN}"}}'), "invalid JSON object"),
        (f"yes {HIDDEN} | head -c 1000000", f"prints more than {MAX_OUTPUT:,} bytes"),
    ],
)
def test_programs_that_break_the_protocol(programs: Path, script: str, reason: str) -> None:
    error = refusal(lambda: helper(programs, script).get("h"))
    assert isinstance(error, AuthenticationError)
    assert error.message.startswith(
        "the credential helper docker-credential-lab (credsStore of FILE) "
    )
    assert reason in error.message
    assert HIDDEN not in f"{error!r} {vars(error)} {error.__cause__!r}"


@pytest.mark.parametrize("script", ["exec >&-; exec sleep 600", f"echo {HIDDEN}; exec sleep 600"])
def test_a_program_that_takes_too_long_is_ended(programs: Path, script: str) -> None:
    note = programs / "pid"
    for timeout_s in (0.5, 5, 50):  # until it has come as far as to say which process it is
        slow = helper(programs, f"echo $$ > {note}.new; mv {note}.new {note}\n{script}", timeout_s)
        error = refusal(partial(slow.get, "h"))
        assert isinstance(error, AuthenticationError)
        assert f"takes longer than {timeout_s} seconds" in error.message
        if note.exists():
            break
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_keeping_and_dropping_may_fail(programs: Path) -> None:
    login = Login("bob", Secret(HIDDEN))
    failing = helper(programs, "cat; exit 1")
    for call in (lambda: failing.keep("h", login), lambda: failing.drop("h")):
        error = refusal(call)
        assert isinstance(error, AuthenticationError)
        assert HIDDEN not in f"{error!r} {vars(error)}"
    assert not helper(programs, NOT_FOUND).drop("h")
    assert helper(programs, "exit 0").drop("h")


def test_a_large_login_is_passed_on_and_is_not_an_argument(programs: Path) -> None:
    kept, seen = programs / "kept", programs / "seen"
    large = Login("bob", Secret(HIDDEN * 20_000))
    script = f'echo "$@" > {seen}; env >> {seen}; tr "\\0" " " < /proc/$$/cmdline >> {seen}'
    helper(programs, f"{script}; cat > {kept}").keep("h", large)
    assert kept.stat().st_size > 200_000
    assert seen.read_text().startswith("store\n")
    assert HIDDEN not in seen.read_text()
    helper(programs, "exit 0").keep("h", large)  # it need not read


@pytest.mark.parametrize("name", ["", "../x", "-x", "x" * 65, "$(x)"])
def test_names_that_are_not_plain(name: str) -> None:
    assert isinstance(refusal(lambda: CredentialHelper(name)), UsageError)


def test_programs_that_are_not_there(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(refusal(lambda: CredentialHelper("nowhere").get("h")), NotFoundError)
    program = programs / "docker-credential-odd"
    program.write_text("#!/is/not/there\n")
    program.chmod(0o755)
    assert isinstance(refusal(lambda: CredentialHelper("odd").get("h")), NotFoundError)
    program.write_bytes(b"\x7fELF broken")
    assert isinstance(refusal(lambda: CredentialHelper("odd").get("h")), StorageError)
    # A program of the current folder is not run, whatever the PATH says.
    program.write_text("#!/bin/sh\necho '{}'\n")
    monkeypatch.chdir(programs)
    monkeypatch.setenv("PATH", ":.")
    assert isinstance(refusal(lambda: CredentialHelper("odd").get("h")), NotFoundError)
