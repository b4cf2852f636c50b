"""Logins at docker-registry, by Basic and by tokens, and in the files of skopeo."""

import io
import json
import sys
from pathlib import Path

import pytest
from support.registries import PASSWORD, USER, registry, skopeo
from support.token_server import PASSWORD as TOKEN_PASSWORD, USER as TOKEN_USER, token_server

from blobstore.cli.main import run
from blobstore.cli.stores import credentials
from blobstore.store.local.store import Store
from blobstore.store.registry.logins import Login, Secret
from blobstore.testing.blobs import commit

pytestmark = pytest.mark.lab


@pytest.fixture(autouse=True)
def auth_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    return tmp_path / "auth.json"


def login(monkeypatch: pytest.MonkeyPatch, host: str, user: str, password: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(password.encode())))
    return run(["login", host, "-u", user, "--password-stdin"])


def test_skopeo_shares_it(tmp_path: Path, auth_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auth_file.write_text(json.dumps({"auths": {"other": {"auth": "eDp5"}}}))
    with registry(tmp_path / "htpasswd", htpasswd=True) as server:
        host, known = server.host, Login(USER, Secret(PASSWORD))
        line = ["login", "--tls-verify=false", "-u", USER, "-p", PASSWORD]
        skopeo(*line, host)
        assert credentials().find(host) == known
        assert run(["logout", host]) == 0
        with pytest.raises(AssertionError, match="not logged into"):
            skopeo("login", "--get-login", host)
        skopeo(*line, f"{host}/team")  # for the longest path
        found = [credentials().find(host, name) for name in ("team/model", "teams/model", "")]
        assert found == [known, None, None]
        assert login(monkeypatch, host, USER, f"{PASSWORD}x") == 1
        assert login(monkeypatch, host, USER, PASSWORD) == 0
        assert skopeo("login", "--get-login", host).strip() == USER
        skopeo("logout", host)
        assert credentials().find(host) is None
        assert f"{PASSWORD}x" not in server.log
    assert credentials().find("other") == Login("x", Secret("y"))


def test_push_and_pull_behind_a_token_server(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its tokens are signed; anyone may pull."""
    commit(store, "m", b"{}", *(b"%d" % number for number in range(20)))
    with (
        token_server(tmp_path / "key") as tokens,
        registry(tmp_path / "registry", tokens=tokens) as server,
    ):
        monkeypatch.setenv("BLOBSTORE_REALMS", tokens.host)
        there = f"{server.host}/team/m:latest"
        push = ["push", "m", "--to", there, "--store", str(store.root)]
        assert run(push) == 1
        assert f"blobstore login {server.host}" in capfd.readouterr().err
        assert login(monkeypatch, server.host, TOKEN_USER, "wrong") == 1
        assert login(monkeypatch, server.host, TOKEN_USER, TOKEN_PASSWORD) == 0
        tokens.asked.clear()
        assert run(push) == 0
        assert server.tags() == {"team/m:latest": store.manifest("m").raw}
        assert server.incomplete() == []
        assert len(tokens.asked) < 5  # far fewer than requests
        assert run(["logout", server.host]) == 0
        assert run(["pull", there, "--store", str(tmp_path / "new")]) == 0
        printed = capfd.readouterr()
        assert TOKEN_PASSWORD not in server.log + printed.out + printed.err
