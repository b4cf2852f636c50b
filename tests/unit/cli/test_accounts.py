"""``login`` and ``logout``: what is checked, kept and printed, and that no secret is."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.token_server import (
    IDENTITY,
    PASSWORD,
    USER,
    GuardedApi,
    TokenServer,
    basic,
    guarded_api,
    token_server,
)

from blobstore.cli.main import run
from blobstore.cli.sharing import credentials
from blobstore.store.registry.logins import Login, Secret


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that logins are kept in; the environment leads to no other."""
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "BLOBSTORE_REALMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return tmp_path / "docker" / "config.json"


@dataclass(frozen=True, slots=True)
class Printed:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


Blobstore = Callable[..., Printed]


@pytest.fixture
def blobstore(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Blobstore]:
    """Run commands with a text on stdin. Nothing that they print contains a secret."""
    seen: list[str] = []

    def command(*words: str, stdin: str = "") -> Printed:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = run(list(words))
        out, err = capfd.readouterr()
        seen.extend((out, err))
        return Printed(code, out, err)

    yield command
    for secret in (PASSWORD, IDENTITY, basic(USER, PASSWORD)[6:], "wrong"):
        assert secret not in "".join(seen)


@pytest.fixture
def registry() -> Iterator[GuardedApi]:
    """A registry that asks for Basic."""
    right = basic(USER, PASSWORD)
    with guarded_api(lambda field, _: field == right, 'Basic realm="x"') as api:
        yield api


@pytest.fixture
def tokens() -> Iterator[TokenServer]:
    """A token server."""
    with token_server() as running:
        yield running


def test_log_in_and_out(blobstore: Blobstore, registry: GuardedApi, config: Path) -> None:
    host = registry.host
    done = blobstore("login", host, "-u", USER, "--password-stdin", stdin=f"{PASSWORD}\n")
    assert done == Printed(0, f"Logged in to {host}; the login is kept in {config}\n", "")
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert credentials().find(host) == Login(USER, Secret(PASSWORD))
    assert [one.path for one in registry.asked] == ["/v2/", "/v2/"]
    assert blobstore("logout", host) == Printed(0, f"Logged out of {host}\n", "")
    assert json.loads(config.read_text()) == {"auths": {}}
    assert blobstore("logout", host) == Printed(0, "", f"Note: Not logged in to {host}.\n")


def test_a_wrong_password_is_not_kept(
    blobstore: Blobstore, registry: GuardedApi, config: Path
) -> None:
    done = blobstore("login", registry.host, "-u", USER, "--password-stdin", stdin="wrong\n")
    assert done.code == 1
    assert f"{registry.host} refuses user '{USER}' (it answers 401)" in done.err
    assert not config.exists()


def test_behind_a_token_server(
    blobstore: Blobstore,
    tokens: TokenServer,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    realm = tokens.host
    with guarded_api(lambda field, _: tokens.knows(field), tokens.challenge) as api:
        line = ["login", api.host, "-u", USER, "--password-stdin"]
        refused = blobstore(*line, stdin=PASSWORD)
        assert refused.code == 1
        assert f"add --realm {realm}" in refused.err
        assert tokens.asked == []
        wrong = blobstore(*line, "--realm", realm, stdin="wrong")
        assert wrong.code == 1
        assert f"{tokens.realm} refuses the user name or the password (it answers 401" in wrong.err
        assert not config.exists()
        assert blobstore(*line, "--realm", realm, stdin=PASSWORD).code == 0
        monkeypatch.setenv("BLOBSTORE_REALMS", f"auth.example.com, {realm}")
        assert blobstore("login", api.host, "--token-stdin", stdin=IDENTITY).code == 0
        assert json.loads(config.read_text()) == {"auths": {api.host: {"identitytoken": IDENTITY}}}
        assert credentials().find(api.host) == Login(None, Secret(IDENTITY))


def test_a_registry_that_does_not_ask(blobstore: Blobstore, config: Path) -> None:
    with guarded_api(lambda *_: True) as api:
        done = blobstore("login", api.host, "-u", USER, "--password-stdin", stdin=PASSWORD)
    assert done.code == 0
    assert done.err == f"Note: {api.host} did not ask for a login, so the login was not checked.\n"


def test_other_places(
    blobstore: Blobstore, registry: GuardedApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = registry.host
    podman = tmp_path / "run" / "containers" / "auth.json"
    podman.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(podman))
    line = ["login", f"http://{host}", "-u", USER, "--password-stdin"]
    assert blobstore(*line, stdin=PASSWORD).out.endswith(f"{podman}\n")
    monkeypatch.delenv("REGISTRY_AUTH_FILE")
    done = blobstore("logout", host)
    assert done.err == (
        f"Note: Not logged in to {host}.\nNote: {podman} still has a login for {host}.\n"
    )


@pytest.mark.parametrize(
    ("words", "stdin", "reason"),
    [
        (["h", "--password-stdin"], PASSWORD, "--password-stdin needs --username USER"),
        (["h", "-u", USER, "--token-stdin"], IDENTITY, "excludes"),
        (["h", "-u", USER], "", "the password can't be asked for"),
        (["h", "-u", USER, "--password-stdin"], "", "the password is empty"),
        (["h", "-u", USER, "--password-stdin"], f"{PASSWORD}\n\n", "line break"),
        (["h", "-u", USER, "--password-stdin"], "x" * 20_000, "longer than 16,384 bytes"),
        (["h", "-u", "a:b", "--password-stdin"], PASSWORD, "colon"),
        (["h", "-u", "", "--password-stdin"], PASSWORD, "the user name is empty"),
        (["a/b", "-u", USER, "--password-stdin"], PASSWORD, "not a registry: 'a/b'"),
        (["http://h", "-u", USER, "--password-stdin"], PASSWORD, "without TLS"),
        (["u:p@h", "-u", USER, "--password-stdin"], PASSWORD, "not a registry"),
        (["h", "-u", USER, "--password", "x"], "", "No such option"),
    ],
)
def test_wrong_use(
    blobstore: Blobstore, config: Path, words: list[str], stdin: str, reason: str
) -> None:
    done = blobstore("login", *words, stdin=stdin)
    assert done.code == 2
    assert reason in done.err
    assert not config.exists()


def answered(host: str, answers: dict[bytes, bytes]) -> tuple[int, bytes]:
    """Log in at a terminal, answering prompts; return the exit code and what is shown."""
    ours, theirs = os.openpty()
    line = [sys.executable, "-m", "blobstore", "login", host]
    with subprocess.Popen(
        line, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        shown = b""
        for prompt, answer in answers.items():
            while prompt not in shown:
                shown += os.read(ours, 4096)
            os.write(ours, answer)
        code = process.wait(120)
    os.close(ours)
    return code, shown


def test_a_prompt_that_is_not_answered(config: Path) -> None:
    code, _ = answered("localhost:1", {b"User: ": b"alice\n", b"Password: ": b"\x04"})
    assert code == 2
    assert not config.exists()


def test_a_password_is_asked_for_without_echo(registry: GuardedApi, config: Path) -> None:
    answers = {b"User: ": f"{USER}\n".encode(), b"Password: ": f"{PASSWORD}\n".encode()}
    code, shown = answered(registry.host, answers | {b"kept in": b""})
    assert code == 0
    assert PASSWORD.encode() not in shown
    assert credentials().find(registry.host) == Login(USER, Secret(PASSWORD), str(config))
