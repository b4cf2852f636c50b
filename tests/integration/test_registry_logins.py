"""Logins at Debian's docker-registry, and in the files of skopeo."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint
from support.corpus import refusal
from support.registries import PASSWORD, USER, Registry, registry, skopeo
from support.token_server import (
    IDENTITY,
    PASSWORD as TOKEN_PASSWORD,
    USER as TOKEN_USER,
    TokenServer,
    token_server,
)

from blobstore import import_model
from blobstore.cli.main import run
from blobstore.cli.sharing import credentials
from blobstore.errors import AuthenticationError
from blobstore.io.http.client import HttpClient
from blobstore.names import Digest
from blobstore.store.local.store import Store
from blobstore.store.registry.api import RegistryApi
from blobstore.store.registry.logins import Login, Secret
from blobstore.store.registry.repositories import Uploads

pytestmark = pytest.mark.lab


@pytest.fixture(autouse=True)
def auth_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that both skopeo and blobstore keep logins in."""
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    return tmp_path / "auth.json"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that asks for USER and PASSWORD by Basic; htpasswd's bcrypt."""
    with registry(tmp_path_factory.mktemp("htpasswd"), htpasswd=True) as running:
        yield running


@contextmanager
def behind_tokens(folder: Path) -> Iterator[tuple[Registry, TokenServer]]:
    """Run a registry behind a token server whose tokens are signed."""
    with (
        token_server(folder / "key") as tokens,
        registry(folder / "registry", tokens=tokens) as running,
    ):
        yield running, tokens


@contextmanager
def api(host: str, login: Login | None, *realms: str) -> Iterator[RegistryApi]:
    with closing(HttpClient()) as client:
        yield RegistryApi(client, f"http://{host}", login, realms=realms)


def blobstore(monkeypatch: pytest.MonkeyPatch, *words: str, stdin: str = "") -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
    return run(list(words))


def test_what_skopeo_writes_is_read(
    guarded: Registry, auth_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    skopeo("login", "--tls-verify=false", "-u", USER, "-p", PASSWORD, guarded.host)
    assert credentials().find(guarded.host) == Login(USER, Secret(PASSWORD), str(auth_file))
    assert run(["logout", guarded.host]) == 0
    assert credentials().find(guarded.host) is None
    line = ["skopeo", "login", "--get-login", guarded.host]
    assert subprocess.run(line, capture_output=True, check=False).returncode != 0


def test_skopeo_reads_what_is_written(
    guarded: Registry,
    auth_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    auth_file.write_text(json.dumps({"auths": {"other": {"auth": "eDp5"}}}))
    line = ["login", guarded.host, "-u", USER, "--password-stdin"]
    assert blobstore(monkeypatch, *line, stdin=PASSWORD) == 0
    assert skopeo("login", "--get-login", guarded.host).strip() == USER
    assert skopeo("login", "--get-login", "other").strip() == "x"
    image = tmp_path / "image"
    image.mkdir()
    config = b'{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}'
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": str(Digest.of(config)),
            "size": len(config),
        },
        "layers": [],
    }
    (image / "version").write_text("Directory Transport Version: 1.1\n")
    (image / "manifest.json").write_text(json.dumps(manifest))
    (image / Digest.of(config).hex).write_bytes(config)
    there = f"docker://{guarded.host}/a/b:latest"
    skopeo("copy", "--dest-tls-verify=false", f"dir:{image}", there)
    assert "Digest" in skopeo("inspect", "--raw=false", "--tls-verify=false", there)
    skopeo("logout", guarded.host)
    assert credentials().find(guarded.host) is None
    assert credentials().find("other") == Login("x", Secret("y"))


def test_podmans_longest_prefix_is_skopeos(
    guarded: Registry, auth_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = guarded.host
    skopeo("login", "--tls-verify=false", "-u", USER, "-p", PASSWORD, f"{host}/team")
    assert credentials().find(host, "team/model") == Login(USER, Secret(PASSWORD))
    assert credentials().find(host, "teams/model") is None
    assert credentials().find(host) is None


def test_basic(
    guarded: Registry, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["login", guarded.host, "-u", USER, "--password-stdin"]
    assert blobstore(monkeypatch, *line, stdin=f"{PASSWORD}x") == 1
    assert "refuses user 'alice'" in capfd.readouterr().err
    with api(guarded.host, Login(USER, Secret(PASSWORD))) as right:
        assert Uploads(right, "a/b").size(Digest.of(b"missing")) is None
    for login in (None, Login(USER, Secret(f"{PASSWORD}x"))):
        with api(guarded.host, login) as wrong:
            call = Uploads(wrong, "a/b").size
            error = refusal(partial(call, Digest.of(b"x")))
            assert isinstance(error, AuthenticationError)
    assert f"{PASSWORD}x" not in guarded.log


def test_signed_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with behind_tokens(tmp_path) as (running, tokens):
        realm = f"127.0.0.1:{tokens.port}"
        monkeypatch.setenv("BLOBSTORE_REALMS", realm)
        line = ["login", running.host, "-u", TOKEN_USER, "--password-stdin"]
        assert blobstore(monkeypatch, *line, stdin="wrong") == 1
        assert blobstore(monkeypatch, *line, stdin=TOKEN_PASSWORD) == 0
        digest = Digest.of(b"blob")
        for login in (credentials().find(running.host), Login(None, Secret(IDENTITY))):
            with api(running.host, login, realm) as right:
                uploads = Uploads(right, "a/b")
                assert uploads.size(digest) is None
                assert not uploads.mount(digest, "c/d")
        scopes = [one.scopes for one in tokens.asked]
        assert ["repository:a/b:pull,push", "repository:c/d:pull"] in scopes
        with api(running.host, None, realm) as anonymous:
            assert Uploads(anonymous, "a/b").size(digest) is None  # anyone may pull
            error = refusal(lambda: Uploads(anonymous, "a/b").mount(digest, "c/d"))
            assert isinstance(error, AuthenticationError)
            assert "denies pull and push of a/b without a login" in error.message
        with api(running.host, credentials().find(running.host)) as unnamed:
            before = len(tokens.asked)
            error = refusal(lambda: Uploads(unnamed, "a/b").size(digest))
            assert f'realms="{realm}"' in str(error.hint)
            assert len(tokens.asked) == before
        printed = capfd.readouterr()
        secrets = (TOKEN_PASSWORD, IDENTITY)
        everything = running.log + printed.out + printed.err
        assert not [secret for secret in secrets if secret in everything]


def test_push_and_pull_behind_a_token_server(
    tmp_path: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import_model(write_checkpoint(tmp_path / "s"), "tiny", store=store, quant="int4")
    with behind_tokens(tmp_path) as (running, tokens):
        tokens.rights = ("pull", "push")
        tokens.expires_in = 60
        monkeypatch.setenv("BLOBSTORE_REALMS", f"127.0.0.1:{tokens.port}")
        there = f"{running.host}/team/tiny:latest"
        push = ["push", "tiny", "--to", there, "--store", str(store.root)]
        assert run(push) == 1
        assert f"blobstore login {running.host}" in capfd.readouterr().err
        skopeo_login = ["login", "--tls-verify=false", "-u", TOKEN_USER, "-p", TOKEN_PASSWORD]
        skopeo(*skopeo_login, running.host)
        assert run(push) == 0
        raw = store.manifest("tiny").raw
        assert running.tags() == {"team/tiny:latest": raw}
        assert running.incomplete() == []
        assert len([one for one in tokens.asked if one.scopes]) < 8  # far fewer than requests
        skopeo("logout", running.host)
        assert run(["pull", there, "--store", str(tmp_path / "new")]) == 0  # anyone may pull
        printed = capfd.readouterr()
        assert TOKEN_PASSWORD not in running.log + printed.out + printed.err


def test_skopeo_and_the_token_server(tmp_path: Path, auth_file: Path) -> None:
    """The token server of the tests is one that others understand."""
    with behind_tokens(tmp_path) as (running, tokens):
        skopeo("login", "--tls-verify=false", "-u", TOKEN_USER, "-p", TOKEN_PASSWORD, running.host)
        assert len(tokens.asked) == 1
        assert credentials().find(running.host) == Login(TOKEN_USER, Secret(TOKEN_PASSWORD))
    assert os.environ["REGISTRY_AUTH_FILE"] == str(auth_file)
