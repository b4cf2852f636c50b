"""Logins, in files as docker's and podman's and by programs: keys, damage, and what is written."""

import base64
import copy
import json
import os
import pickle
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.corpus import refusal

from blobstore.errors import (
    AuthenticationError,
    DocumentError,
    LimitExceededError,
    NotFoundError,
    StorageError,
    UsageError,
)
from blobstore.store.registry.logins import (
    MAX_OUTPUT,
    CredentialHelper,
    Credentials,
    Login,
    Secret,
    login_files,
)

HUB = "https://index.docker.io/v1/"
HIDDEN = "swordfish-93ab"


def auth(user: str, password: str = HIDDEN) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def file(tmp_path: Path) -> Credentials:
    return Credentials(tmp_path / "docker" / "config.json")


def write(file: Credentials, content: object) -> None:
    file.path.parent.mkdir(exist_ok=True)
    file.path.write_text(content if isinstance(content, str) else json.dumps(content))


def test_a_secret_is_not_shown_and_does_not_leave_the_process() -> None:
    secret = Secret(HIDDEN)
    login = Login("bob", secret, "a file")
    shown = [str(secret), repr(secret), f"{secret!r:>9}", f"{secret:10}", repr({secret: [login]})]
    assert not [text for text in shown if HIDDEN in text]
    assert str(login) == "user 'bob' (from a file)"
    assert str(Login(None, secret)) == "an identity token"
    for leave in (pickle.dumps, copy.copy, copy.deepcopy, json.dumps):
        with pytest.raises(TypeError):
            leave(secret)
    with pytest.raises(TypeError):
        asdict(login)


PODMAN = ["h/a/b/c", "h/a/b", "h/a", "h"]
"""The longest path wins, by whole segments."""


@pytest.mark.parametrize(
    ("keys", "host", "repository", "index"),
    [
        (["ghcr.io"], "GHCR.io", "a/b", 0),
        (["localhost:5000"], "localhost", "", None),
        (["http://localhost:5000/v1/"], "localhost:5000", "a/b", 0),
        ([HUB], "registry-1.docker.io", "", 0),
        (["https://ghcr.io/v1/", "ghcr.io"], "ghcr.io", "", 1),
        (PODMAN, "h", "a/b", 1),
        (PODMAN, "h", "a/bc", 2),
        (["docker.io/library", HUB], "docker.io", "library/x", 0),
        (["ghcr.io.evil.example", "https://ghcr.io@evil.example/"], "ghcr.io", "", None),
    ],
)
def test_found(
    file: Credentials, keys: list[str], host: str, repository: str, index: int | None
) -> None:
    auths = {key: {"auth": auth(f"user{at}")} for at, key in enumerate(keys)}
    write(file, {"auths": auths})
    found = file.find(host, repository)
    place = str(file.path)
    assert found == (None if index is None else Login(f"user{index}", Secret(HIDDEN), place))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"auth": auth("bob", f"a:b:c{HIDDEN}\0\0")}, Login("bob", Secret(f"a:b:c{HIDDEN}"))),
        ({"auth": auth("bob", "pässword"), "other": [1]}, Login("bob", Secret("pässword"))),
        ({"identitytoken": HIDDEN, "auth": auth("bob")}, Login(None, Secret(HIDDEN))),
        ({"auth": None, "email": ""}, None),
    ],
)
def test_an_entry(file: Credentials, entry: dict[str, Any], expected: Login | None) -> None:
    write(file, {"auths": {"h": entry, "damaged": 1}})
    assert file.find("h") == expected


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "JSON"),
        ('{"auths": {}, "auths": {}}', "'auths' appears twice"),
        ('{"a":' * 70 + "1" + "}" * 70, "64 levels"),
        ({"auths": [1]}, "'auths'"),
        ({"auths": {"h": HIDDEN}}, "'auths[h]'"),
        ({"auths": {"h": {"identitytoken": [HIDDEN]}}}, "'auths[h]'"),
        ({"auths": {"h": {"auth": HIDDEN}}}, "not base64"),
        ({"auths": {"h": {"auth": base64.b64encode(HIDDEN.encode()).decode()}}}, "USER:PASSWORD"),
        ({"credsStore": "../x"}, "'credsStore'"),
        ({"credHelpers": {"h": ["x"]}}, "'credHelpers[h]'"),
    ],
)
def test_damaged_files(file: Credentials, content: object, says: str) -> None:
    write(file, content)
    error = refusal(lambda: file.find("h"))
    assert isinstance(error, DocumentError)
    assert error.rule == "K1"
    assert str(file.path) in error.message
    assert says in error.message
    assert HIDDEN not in f"{error!r} {error} {error.hint} {vars(error)}"


def test_a_damaged_file_is_not_replaced(file: Credentials) -> None:
    write(file, '{"auths": [1]}')
    with pytest.raises(DocumentError):
        file.keep("h", Login("bob", Secret("x")))
    assert file.path.read_text() == '{"auths": [1]}'


def test_what_is_not_a_small_file(file: Credentials) -> None:
    write(file, '{"a": "' + "x" * 2**20 + '"}')
    with pytest.raises(LimitExceededError):
        file.find("h")
    file.path.unlink()
    os.mkfifo(file.path)
    with pytest.raises(StorageError):
        file.find("h")


@pytest.mark.parametrize(
    ("host", "key", "login"),
    [
        ("localhost:5000", "localhost:5000", Login("bob", Secret("a:b"))),
        ("docker.io", HUB, Login(None, Secret("t"))),
    ],
)
def test_what_is_kept_is_found(file: Credentials, host: str, key: str, login: Login) -> None:
    assert file.keep(host, login) == str(file.path)
    assert file.find(host) == login
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    assert json.loads(file.path.read_text())["auths"].keys() == {key}
    assert [*file.path.parent.iterdir()] == [file.path]
    assert file.drop(host)
    assert file.find(host) is None
    assert not file.drop(host)


def test_other_keys_stay_and_other_spellings_go(file: Credentials) -> None:
    others = {"HttpHeaders": {"X": "ü"}, "experimental": 1.5, "x": [1, None]}
    kept = {
        "docker.io/library": {"auth": auth("namespace")},
        "ghcr.io": {"auth": auth("other"), "unknown": True},
        "broken": 7,
    }
    old = {"docker.io": {"auth": auth("old")}, HUB: {"auth": auth("older"), "email": "e"}}
    write(file, {**others, "auths": {**old, **kept}})
    file.path.chmod(0o644)
    file.keep("docker.io", Login("bob", Secret(HIDDEN)))
    written = json.loads(file.path.read_text())
    assert written == {**others, "auths": {**kept, HUB: {"auth": auth("bob")}}}
    assert list(written) == [*others, "auths"]
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert file.drop("index.docker.io")
    assert json.loads(file.path.read_text()) == {**others, "auths": kept}


def test_a_link_to_the_file_stays(tmp_path: Path) -> None:
    (tmp_path / "dotfiles").mkdir()
    link = tmp_path / "config.json"
    link.symlink_to(Path("dotfiles", "config.json"))
    for host in ("h", "i"):  # the link leads nowhere at first
        Credentials(link).keep(host, Login("bob", Secret(HIDDEN)))
    assert link.is_symlink()
    written = json.loads((tmp_path / "dotfiles" / "config.json").read_text())
    assert written["auths"] == {host: {"auth": auth("bob")} for host in "hi"}


def test_a_failed_write_changes_nothing(file: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, {"x": 1})
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(StorageError):
        file.keep("h", Login("bob", Secret(HIDDEN)))
    assert json.loads(file.path.read_text()) == {"x": 1}
    assert [*file.path.parent.iterdir()] == [file.path]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ["~/.docker/config.json", "/run/containers/7", "~/.config/containers"]),
        (
            {"DOCKER_CONFIG": "/d", "XDG_RUNTIME_DIR": "/r", "XDG_CONFIG_HOME": "/c"},
            ["/d/config.json", "/r/containers", "/c/containers"],
        ),
        ({"REGISTRY_AUTH_FILE": "/a", "DOCKER_CONFIG": "/d"}, ["/a"]),
    ],
)
def test_the_order_of_files(variables: dict[str, str], expected: list[str]) -> None:
    paths = [str(path) for path in login_files(variables, Path("/home"), 7)]
    assert [path.replace("/home", "~").removesuffix("/auth.json") for path in paths] == expected


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


KEEPER = f"""
cd "${{0%/*}}" || exit
case $1 in
store) cat > stored;;
get) cat >/dev/null; cat stored 2>/dev/null || {{ {NOT_FOUND}; }};;
erase) rm stored 2>/dev/null || {{ {NOT_FOUND}; }};;
esac
"""


@pytest.mark.parametrize(
    ("config", "login", "user"),
    [
        ({"credsStore": "lab"}, Login("bob", Secret(HIDDEN)), "bob"),
        ({"credHelpers": {"h": "lab"}}, Login(None, Secret("t")), "<token>"),
    ],
)
def test_a_helper_keeps_logins(
    file: Credentials, programs: Path, config: dict[str, Any], login: Login, user: str
) -> None:
    write(file, config | {"auths": {"h": {"auth": auth("old")}}})
    helper(programs, KEEPER)
    stored = programs / "stored"
    assert file.find("h") == Login("old", Secret(HIDDEN), str(file.path))  # the helper has none
    assert file.keep("h", login) == "docker-credential-lab"
    expected = {"ServerURL": "h", "Username": user, "Secret": login.secret.reveal()}
    assert json.loads(stored.read_text()) == expected
    assert json.loads(file.path.read_text()) == config | {"auths": {"h": {}}}
    assert file.find("h") == login
    assert file.drop("h")
    assert not stored.exists()
    assert file.find("h") is None
    assert not file.drop("h")


def test_the_first_file_that_has_a_login_decides(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in "123")
    credentials = Credentials(first, second, third)
    second.write_text(json.dumps({"auths": {"h": {"auth": auth("user")}}}))
    third.write_text("damaged, and not read")
    assert credentials.find("h") == Login("user", Secret(HIDDEN), str(second))
    with pytest.raises(DocumentError):
        credentials.find("other")
    assert credentials.keep("h", Login("bob", Secret("x"))) == str(first)
    assert credentials.find("h") == Login("bob", Secret("x"))
    assert credentials.drop("h")
    assert credentials.find("h") == Login("user", Secret(HIDDEN))


# Helpers: the protocol, and programs that break it. Their output is never shown


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("""echo '{"Username":"<token>","Secret":"s"}'""", Login(None, Secret("s"))),
        ("""cat >/dev/null; echo '{"ServerURL":"h","Username":"","Secret":""}'""", None),
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
        (f"""echo '{{"Username":1,"Secret":"{HIDDEN}"}}'""", "JSON"),
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
