"""``blobstore serve``: what it starts, and what it refuses. Its processes: tests/integration."""

import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.commands import Cli
from support.web_client import Client

from blobstore.store.local.store import Store

HOSTS = ("models.example", "A_b", "127.0.0.1", "::1", "[fe80::1]")


def test_it_serves_the_store_to_the_names_that_are_allowed(
    store: Store, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blobstore.web import application as server

    store.blobs.path.mkdir(parents=True)
    started: list[Any] = []

    def serve_at(app: Any, *place: object, ready: Callable[[str], None], log: bool) -> None:
        ready("http://127.0.0.1:7/")
        started.extend((app, *place, log))

    monkeypatch.setattr(server, "serve_at", serve_at)
    hosts = [word for host in HOSTS for word in ("--allowed-host", host)]
    out = cli.text("serve", "--port", "7", *hosts)
    serving = f"Serving {store.root} at http://127.0.0.1:7/\n"
    empty = f"No models in {store.root} yet. Import one: blobstore import FOLDER\n"
    assert (out, cli.err) == (serving + empty, "")
    app, *given = started
    assert given == ["127.0.0.1", 7, False]
    client = Client(app)
    assert client.get("/api/models", host="models.example").json == []
    assert client.get("/api/models", host="other.example").status == 421
    assert client.get("/v2/").status == 200


def test_a_missing_extra_is_named(cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.blobs.path.mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    err = cli.refused("serve")
    assert "starlette and uvicorn are not installed" in err
    assert f"Install it: {sys.executable} -m pip install " in err
    assert "blobstore" not in err.rpartition(" install ")[2]


def test_a_taken_port_is_told_before_the_model_is_loaded(store: Store, cli: Cli) -> None:
    store.blobs.path.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        error = cli.refused("serve", "--lm", "missing", "--port", taken.getsockname()[1], code=1)
    assert "is in use by another process" in error
