"""Files with logins: docker's and podman's keys, damaged files, and what is written."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from support.corpus import refusal

from blobstore.errors import (
    BlobStoreError,
    DocumentError,
    LimitExceededError,
    NotFoundError,
    StorageError,
)
from blobstore.store.registry.logins import (
    Credentials,
    Login,
    Secret,
    login_files,
)

HUB = "https://index.docker.io/v1/"
HIDDEN = "swordfish-93ab"


def auth(user: str, password: str = HIDDEN) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def entries(*keys: str) -> dict[str, Any]:
    """Return ``auths`` in which the user of each key is the key's place."""
    return {"auths": {key: {"auth": auth(f"user{index}")} for index, key in enumerate(keys)}}


@pytest.fixture
def file(tmp_path: Path) -> Credentials:
    """A file that is missing, in a folder that is missing."""
    return Credentials(tmp_path / "docker" / "config.json")


def write(file: Credentials, content: object) -> None:
    file.path.parent.mkdir(exist_ok=True)
    file.path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("keys", "host", "repository", "index"),
    [
        (["ghcr.io"], "ghcr.io", "", 0),
        (["ghcr.io"], "GHCR.io", "a/b", 0),
        (["localhost:5000"], "localhost:5000", "", 0),
        (["localhost:5000"], "localhost", "", None),
        (["localhost"], "localhost:5000", "", None),
        (["https://ghcr.io"], "ghcr.io", "", 0),
        (["http://localhost:5000/v1/"], "localhost:5000", "a/b", 0),
        (["ghcr.io/v1/"], "ghcr.io", "a/b", 0),
        ([HUB], "docker.io", "library/x", 0),
        ([HUB], "registry-1.docker.io", "", 0),
        (["docker.io"], "index.docker.io", "", 0),
        (["https://ghcr.io/v1/", "ghcr.io"], "ghcr.io", "", 1),
        # podman: the longest path wins, by whole segments
        (["h/a/b/c", "h/a/b", "h/a", "h"], "h", "a/b", 1),
        (["h/a/b/c", "h/a/b", "h/a", "h"], "h", "a/b/c", 0),
        (["h/a/b/c", "h/a/b", "h/a", "h"], "h", "a/bc", 2),
        (["h/a/b/c", "h/a/b", "h/a", "h"], "h", "", 3),
        (["h/a"], "h", "", None),
        (["h/a"], "h", "ab/c", None),
        (["docker.io/library", HUB], "docker.io", "library/x", 0),
        (["evil.example"], "ghcr.io", "", None),
        (["ghcr.io.evil.example", "https://ghcr.io@evil.example/"], "ghcr.io", "", None),
        ([], "ghcr.io", "", None),
    ],
)
def test_which_key_is_found(
    file: Credentials, keys: list[str], host: str, repository: str, index: int | None
) -> None:
    write(file, entries(*keys))
    found = file.find(host, repository)
    assert found == (None if index is None else Login(f"user{index}", Secret(HIDDEN)))
    assert found is None or found.place == str(file.path)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"auth": auth("bob")}, Login("bob", Secret(HIDDEN))),
        ({"auth": auth("bob", "a:b:c")}, Login("bob", Secret("a:b:c"))),
        ({"auth": auth("bob", f"{HIDDEN}\0\0")}, Login("bob", Secret(HIDDEN))),
        ({"auth": auth("bob", "pässword")}, Login("bob", Secret("pässword"))),
        ({"auth": auth("bob", "")}, Login("bob", Secret(""))),
        ({"identitytoken": HIDDEN, "auth": auth("bob")}, Login(None, Secret(HIDDEN))),
        ({"identitytoken": HIDDEN, "auth": ""}, Login(None, Secret(HIDDEN))),
        (
            {"auth": auth("bob"), "email": "bob@example.com", "other": [1]},
            Login("bob", Secret(HIDDEN)),
        ),
        ({}, None),
        ({"auth": None, "email": ""}, None),
    ],
)
def test_what_an_entry_says(
    file: Credentials, entry: dict[str, Any], expected: Login | None
) -> None:
    write(file, {"auths": {"h": entry}})
    assert file.find("h") == expected


@pytest.mark.parametrize("content", ["", " \n", "{}", '{"auths": null}', '{"auths": {}}'])
def test_files_without_logins(file: Credentials, content: str) -> None:
    assert file.find("h") is None
    write(file, content)
    assert file.find("h") is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"auths": {}, "auths": {}}', "'auths' appears twice"),
        ("\ufeff{}", "not valid JSON"),
        ('{"a":' * 70 + "1" + "}" * 70, "64 levels"),
        ({"auths": [1]}, "'auths' is not an object"),
        ({"auths": {"h": HIDDEN}}, "'auths[h]' is not an object"),
        ({"auths": {"h": {"auth": {"x": HIDDEN}}}}, "'auths[h]' has a value"),
        ({"auths": {"h": {"identitytoken": [HIDDEN]}}}, "'auths[h]' has a value"),
        ({"auths": {"h": {"auth": HIDDEN}}}, "'auths[h]' has an auth that is not base64"),
        ({"auths": {"h": {"auth": auth(HIDDEN)[:-1]}}}, "not base64"),
        ({"auths": {"h": {"auth": "/w=="}}}, "not base64 of a text"),
        ({"auths": {"h": {"auth": base64.b64encode(HIDDEN.encode()).decode()}}}, "USER:PASSWORD"),
        ({"auths": {"h": {"auth": auth("")}}}, "USER:PASSWORD"),
        ({"credsStore": 1}, "'credsStore' is not the name"),
        ({"credsStore": "a/b"}, "'credsStore' is not the name"),
        ({"credsStore": "../x"}, "'credsStore' is not the name"),
        ({"credsStore": "x; rm -rf ~"}, "'credsStore' is not the name"),
        ({"credHelpers": {"h": ["x"]}}, "'credHelpers[h]' is not the name"),
        ({"credHelpers": "x"}, "'credHelpers' is not an object"),
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
    before = file.path.read_bytes()
    if not isinstance(content, dict) or "h" not in (content.get("auths") or {}):
        with pytest.raises(DocumentError):
            file.keep("h", Login("bob", Secret(HIDDEN)))
        assert file.path.read_bytes() == before


def test_another_entry_may_be_damaged(file: Credentials) -> None:
    write(file, {"auths": {"h": {"auth": auth("bob")}, "other": 1}})
    assert file.find("h") == Login("bob", Secret(HIDDEN))


def test_what_is_not_a_small_file(file: Credentials) -> None:
    write(file, '{"a": "' + "x" * 2**20 + '"}')
    assert isinstance(refusal(lambda: file.find("h")), LimitExceededError)
    file.path.unlink()
    os.mkfifo(file.path)
    assert isinstance(refusal(lambda: file.find("h")), StorageError)
    file.path.unlink()
    file.path.mkdir()
    assert isinstance(refusal(lambda: file.find("h")), StorageError)


@pytest.mark.parametrize("login", [Login("bob", Secret("a:b")), Login(None, Secret("t"))])
@pytest.mark.parametrize("host", ["ghcr.io", "localhost:5000", "docker.io"])
def test_what_is_kept_is_found(file: Credentials, host: str, login: Login) -> None:
    assert file.keep(host, login) == str(file.path)
    assert file.find(host) == login
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    assert list(json.loads(file.path.read_text())["auths"]) == [
        HUB if host == "docker.io" else host
    ]
    assert [*file.path.parent.iterdir()] == [file.path]
    assert file.drop(host)
    assert file.find(host) is None
    assert not file.drop(host)


def test_other_keys_stay_and_other_spellings_go(file: Credentials) -> None:
    others = {"HttpHeaders": {"X": "ü"}, "psFormat": "a", "experimental": 1.5, "x": [1, None]}
    auths = {
        "docker.io": {"auth": auth("old")},
        HUB: {"auth": auth("older"), "email": "e"},
        "docker.io/library": {"auth": auth("namespace")},
        "ghcr.io": {"auth": auth("other"), "unknown": True},
        "broken": 7,
    }
    write(file, {**others, "auths": auths})
    file.path.chmod(0o644)
    file.keep("docker.io", Login("bob", Secret(HIDDEN)))
    written = json.loads(file.path.read_text())
    kept = {key: auths[key] for key in ("docker.io/library", "ghcr.io", "broken")}
    assert written == {**others, "auths": {**kept, HUB: {"auth": auth("bob")}}}
    assert list(written) == [*others, "auths"]
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert file.drop("index.docker.io")
    assert json.loads(file.path.read_text()) == {**others, "auths": kept}


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_to_the_file_stays(tmp_path: Path, dangling: bool) -> None:
    target = tmp_path / "dotfiles" / "config.json"
    target.parent.mkdir()
    if not dangling:
        target.write_text('{"x": 1}')
    link = tmp_path / "config.json"
    link.symlink_to(Path("dotfiles", "config.json"))
    Credentials(link).keep("h", Login("bob", Secret(HIDDEN)))
    assert link.is_symlink()
    written = json.loads(target.read_text())
    assert written["auths"] == {"h": {"auth": auth("bob")}}
    assert written.get("x") == (None if dangling else 1)


def test_a_link_to_itself(tmp_path: Path) -> None:
    link = tmp_path / "config.json"
    link.symlink_to(link)
    for call in (
        lambda: Credentials(link).find("h"),
        lambda: Credentials(link).keep("h", Login("bob", Secret(HIDDEN))),
    ):
        assert isinstance(refusal(call), BlobStoreError)
    assert link.is_symlink()


def test_a_failed_write_leaves_the_old_file(
    file: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(file, {"x": 1})

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("blobstore.io.durable.sync", fail)
    error = refusal(lambda: file.keep("h", Login("bob", Secret(HIDDEN))))
    assert isinstance(error, StorageError)
    assert str(file.path) in error.message
    assert json.loads(file.path.read_text()) == {"x": 1}
    assert [*file.path.parent.iterdir()] == [file.path]


def places(tmp_path: Path, **variables: str) -> list[str]:
    upper = {name.upper(): value for name, value in variables.items()}
    paths = login_files(upper, tmp_path, 7)
    return [str(path).replace(str(tmp_path), "~") for path in paths]


def test_the_order_of_files(tmp_path: Path) -> None:
    others = ["/run/containers/7/auth.json", "~/.config/containers/auth.json"]
    assert places(tmp_path) == ["~/.docker/config.json", *others]
    assert places(tmp_path, docker_config="/d") == ["/d/config.json", *others]
    assert places(tmp_path, xdg_runtime_dir="/r", xdg_config_home="/c") == [
        "~/.docker/config.json",
        "/r/containers/auth.json",
        "/c/containers/auth.json",
    ]
    assert places(tmp_path, registry_auth_file="/a", docker_config="/d") == ["/a"]


def test_the_first_file_that_has_a_login_decides(tmp_path: Path) -> None:
    paths = [tmp_path / "1", tmp_path / "2", tmp_path / "3"]
    credentials = Credentials(*paths)
    paths[1].write_text(json.dumps(entries("h")))
    paths[2].write_text("damaged, and not read")
    assert credentials.find("h") == Login("user0", Secret(HIDDEN), str(paths[1]))
    assert isinstance(refusal(lambda: credentials.find("other")), DocumentError)
    assert credentials.keep("h", Login("bob", Secret("x"))) == str(paths[0])
    assert credentials.find("h") == Login("bob", Secret("x"))
    assert credentials.drop("h")
    assert credentials.find("h") == Login("user0", Secret(HIDDEN))
    assert not credentials.drop("h")


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A helper ``lab`` on the PATH, which keeps logins in the folder that is returned."""
    folder = tmp_path / "kept"
    folder.mkdir()
    program = tmp_path / "bin" / "docker-credential-lab"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
        cd {folder}
        case $1 in
        store) IFS= read -r line; printf '%s' "$line" > stored;;
        get) IFS= read -r key || true
             if [ -e stored ]; then cat stored; else
             echo credentials not found in native keychain; exit 1; fi;;
        erase) rm stored 2>/dev/null ||
             {{ echo credentials not found in native keychain; exit 1; }};;
        esac
        """
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize("login", [Login("bob", Secret(HIDDEN)), Login(None, Secret("t"))])
@pytest.mark.parametrize("config", [{"credsStore": "lab"}, {"credHelpers": {"h": "lab"}}])
def test_a_helper_keeps_logins(
    file: Credentials, helper: Path, config: dict[str, Any], login: Login
) -> None:
    write(file, config | {"auths": {"h": {"auth": auth("old")}}})
    assert file.find("h") == Login("old", Secret(HIDDEN))  # the helper has none
    assert file.keep("h", login) == "docker-credential-lab"
    user = "<token>" if login.user is None else login.user
    assert json.loads((helper / "stored").read_text()) == {
        "ServerURL": "h",
        "Username": user,
        "Secret": login.secret.reveal(),
    }
    assert json.loads(file.path.read_text()) == config | {"auths": {"h": {}}}
    found = file.find("h")
    assert found == login
    assert found is not None
    assert found.place == "docker-credential-lab"
    assert file.drop("h")
    assert not (helper / "stored").exists()
    assert file.find("h") is None
    assert not file.drop("h")


def test_a_helper_for_one_registry_goes_before_that_for_all(
    file: Credentials, helper: Path
) -> None:
    write(file, {"credsStore": "is-not-there", "credHelpers": {HUB: "lab"}})
    assert file.find("docker.io") is None
    error = refusal(lambda: file.find("h"))
    assert isinstance(error, NotFoundError)
    assert error.message == (
        f"the credential helper docker-credential-is-not-there (credsStore of {file.path}) is not"
        " installed"
    )


def test_the_bytes_that_are_written(file: Credentials) -> None:
    """They are those of docker's encoder, with tabs."""
    file.keep("h:5000", Login("bob", Secret(HIDDEN)))
    assert file.path.read_text() == (
        '{\n\t"auths": {\n\t\t"h:5000": {\n\t\t\t"auth": "' + auth("bob") + '"\n\t\t}\n\t}\n}'
    )
