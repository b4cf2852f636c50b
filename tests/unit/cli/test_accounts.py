"""``login`` and ``logout``: what is checked, kept and printed, and that no secret is."""

import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import token_server
from support.token_server import IDENTITY, PASSWORD, USER, GuardedApi, basic, guarded_api

from blobstore.cli.main import run
from blobstore.cli.stores import credentials
from blobstore.store.registry.logins import Login, Secret


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that logins are kept in; the environment leads to no other."""
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "BLOBSTORE_REALMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return tmp_path / "docker" / "config.json"


Blobstore = Callable[..., tuple[int, str, str]]


@pytest.fixture
def blobstore(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Blobstore]:
    """Run commands with a text on stdin. Nothing that they print contains a secret."""
    seen: list[str] = []

    def command(*words: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = run(list(words))
        out, err = capfd.readouterr()
        seen.extend((out, err))
        return code, out, err

    yield command
    for secret in (PASSWORD, IDENTITY, basic(USER, PASSWORD)[6:], "wrong"):
        assert secret not in "".join(seen)


@pytest.fixture
def registry() -> Iterator[GuardedApi]:
    right = basic(USER, PASSWORD)
    with guarded_api(lambda field, _: field == right, 'Basic realm="x"') as api:
        yield api


def test_log_in_and_out(blobstore: Blobstore, registry: GuardedApi, config: Path) -> None:
    host = registry.host
    line = ("login", host, "-u", USER, "--password-stdin")
    code, _, err = blobstore(*line, stdin="wrong\n")
    assert (code, f"{host} refuses user '{USER}'" in err, config.exists()) == (1, True, False)
    done = blobstore(*line, stdin=f"{PASSWORD}\n")
    assert done == (0, f"Logged in to {host}; the login is stored in {config}\n", "")
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert credentials().find(host) == Login(USER, Secret(PASSWORD))
    assert blobstore("logout", host) == (0, f"Logged out of {host}\n", "")
    assert json.loads(config.read_text()) == {"auths": {}}
    assert blobstore("logout", host) == (0, "", f"Note: Not logged in to {host}.\n")


def test_behind_a_token_server(
    blobstore: Blobstore, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        token_server.token_server() as tokens,
        guarded_api(lambda field, _: tokens.knows(field), tokens.challenge) as api,
    ):
        realm = tokens.host
        line = ["login", api.host, "-u", USER, "--password-stdin"]
        code, _, err = blobstore(*line, stdin=PASSWORD)
        assert (code, f"add --realm {realm}" in err, tokens.asked) == (1, True, [])
        assert blobstore(*line, "--realm", realm, stdin="wrong")[0] == 1
        assert not config.exists()
        assert blobstore(*line, "--realm", realm, stdin=PASSWORD)[0] == 0
        monkeypatch.setenv("BLOBSTORE_REALMS", f"auth.example.com, {realm}")
        assert blobstore("login", api.host, "--token-stdin", stdin=IDENTITY)[0] == 0
        assert json.loads(config.read_text()) == {"auths": {api.host: {"identitytoken": IDENTITY}}}
        assert credentials().find(api.host) == Login(None, Secret(IDENTITY))


def test_wrong_use(blobstore: Blobstore, config: Path) -> None:
    for words, stdin, reason in (
        ("h --password-stdin", PASSWORD, "--password-stdin needs --username USER"),
        (f"h -u {USER}", "", "can't ask for the password"),
        (f"h -u {USER} --password-stdin", f"{PASSWORD}\n\n", "line break"),
        (f"h -u {USER} --password-stdin", "x" * 20_000, "longer than 16,384 bytes"),
        ("h -u a:b --password-stdin", PASSWORD, "colon"),
        (f"http://h -u {USER} --password-stdin", PASSWORD, "without TLS"),
        (f"u:p@h -u {USER} --password-stdin", PASSWORD, "not a registry"),
        (f"h -u {USER} --password x", "", "No such option"),
    ):
        code, _, err = blobstore("login", *words.split(), stdin=stdin)
        assert (code, reason in err, config.exists()) == (2, True, False)


def test_a_password_is_asked_for_without_echo(registry: GuardedApi, config: Path) -> None:
    ours, theirs = os.openpty()
    line = [sys.executable, "-m", "blobstore", "login", registry.host]
    shown = b""
    with subprocess.Popen(
        line, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        for prompt, answer in ((b"User: ", USER), (b"Password: ", PASSWORD), (b"stored in", "")):
            while prompt not in shown:
                shown += os.read(ours, 4096)
            os.write(ours, f"{answer}\n".encode())
        assert process.wait(600) == 0
    os.close(ours)
    assert PASSWORD.encode() not in shown
    assert credentials().find(registry.host) == Login(USER, Secret(PASSWORD), str(config))
