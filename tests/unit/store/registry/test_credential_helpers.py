"""Credential helpers: the protocol, and programs that break it. Their output is never shown."""

import os
from pathlib import Path

import pytest
from support.corpus import refusal

from blobstore.errors import AuthenticationError, NotFoundError, StorageError, UsageError
from blobstore.store.registry.logins import MAX_OUTPUT, CredentialHelper, Login, Secret

HIDDEN = "swordfish-55e0"
NOT_FOUND = "echo credentials not found in native keychain; exit 1"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
        (f"echo '{HIDDEN}'; exit 3", "exit code 3"),
        (f"echo '{HIDDEN}'", "JSON"),
        (says(f'{{"Username":1,"Secret":"{HIDDEN}"}}'), "JSON"),
        (f"yes {HIDDEN} | head -c 1000000", f"{MAX_OUTPUT:,} bytes"),
    ],
)
def test_programs_that_break_the_protocol(programs: Path, script: str, reason: str) -> None:
    error = refusal(lambda: helper(programs, script).get("h"))
    assert isinstance(error, AuthenticationError)
    assert "docker-credential-lab (credsStore of FILE) " in error.message
    assert reason in error.message
    assert HIDDEN not in f"{error!r} {vars(error)} {error.__cause__!r}"


@pytest.mark.parametrize("script", ["exec >&-; exec sleep 600", f"echo {HIDDEN}; exec sleep 600"])
def test_a_program_that_takes_too_long_is_ended(programs: Path, script: str) -> None:
    """It has a pipe open for as long as it lives, if it lived long enough to open it."""
    os.mkfifo(programs / "alive")
    alive = os.open(programs / "alive", os.O_RDONLY | os.O_NONBLOCK)
    slow = helper(programs, f"exec 3>{programs / 'alive'}; {script}", timeout_s=0.5)
    error = refusal(lambda: slow.get("h"))
    assert isinstance(error, AuthenticationError)
    assert "0.5 seconds" in error.message
    assert os.read(alive, 1) == b""  # no process has it open for writing
    os.close(alive)


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
    helper(programs, f'echo "$@" > {seen}; env >> {seen}; cat > {kept}').keep("h", large)
    assert kept.stat().st_size > 200_000
    assert seen.read_text().startswith("store\n")
    assert HIDDEN not in seen.read_text()
    helper(programs, "exit 0").keep("h", large)  # it need not read


@pytest.mark.parametrize("name", ["", "../x", "-x", "x" * 65])
def test_names_that_are_not_plain(name: str) -> None:
    assert isinstance(refusal(lambda: CredentialHelper(name)), UsageError)


def test_programs_that_are_not_there(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(refusal(lambda: CredentialHelper("nowhere").get("h")), NotFoundError)
    program = programs / "docker-credential-odd"
    program.write_bytes(b"\x7fELF broken")
    program.chmod(0o755)
    assert isinstance(refusal(lambda: CredentialHelper("odd").get("h")), StorageError)
    # A program of the current folder is not run, whatever the PATH says.
    program.write_text("#!/bin/sh\necho '{}'\n")
    monkeypatch.chdir(programs)
    monkeypatch.setenv("PATH", ":.")
    assert isinstance(refusal(lambda: CredentialHelper("odd").get("h")), NotFoundError)
