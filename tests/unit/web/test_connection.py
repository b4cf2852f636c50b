"""Connections on real sockets: uvicorn as it is configured, and what clients may send."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import blobstore
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.names import Digest, ModelName
from blobstore.web import application as server
from blobstore.web.application import Hosts, application
from blobstore.web.distribution import distribution_routes

WEIGHTS = bytes(range(251)) * 100_000  # more than the buffers of two sockets hold
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
BLOB = f"/v2/library/tiny/blobs/{Digest.of(WEIGHTS)}".encode()
PATIENCE_S = 300


@contextmanager
def running(app: Any) -> Iterator[int]:
    """Run the server in a thread; yield its port."""
    found = uvicorn.Server(server._config(app))
    with server._listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=found.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            found.should_exit = True
            thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one blob."""
    store = blobstore.open_store(tmp_path_factory.mktemp("connections") / "store")
    layer = Descriptor("application/vnd.ollama.image.tensor", Digest.of(WEIGHTS), len(WEIGHTS))
    with store.session() as session:
        session.put(WEIGHTS)
        session.publish(ModelName.parse("tiny:x"), Manifest(layers=(layer,)))
    return store.root


@pytest.fixture(scope="module")
def port(root: Path) -> Iterator[int]:
    """The port of a server over the store."""
    store = blobstore.open_store(root)
    app = application(store, Hosts("127.0.0.1"), more=distribution_routes(store))
    with running(app) as found:
        yield found


def connected(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def answer(client: socket.socket) -> tuple[bytes, bytes]:
    """Return the head and the body of an answer with a length; nothing that follows is read."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = client.recv(1)
        assert byte, f"closed after {head!r}"
        head += byte
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    body = b""
    while len(body) < length:
        piece = client.recv(length - len(body))
        assert piece, "closed in the middle"
        body += piece
    return head, body


def rest(client: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection, in whatever way."""
    got = b""
    with suppress(ConnectionError):
        while piece := client.recv(2**20):
            got += piece
    return got


def test_a_blob_and_what_follows_in_one_connection(port: int) -> None:
    with connected(port) as client:
        client.sendall(GET % BLOB + GET % b"/v2/" + GET % BLOB)
        assert [answer(client)[1] for _ in range(3)] == [WEIGHTS, b"{}", WEIGHTS]


def test_a_blob_that_is_cut_ends_the_connection(root: Path, port: int) -> None:
    path = root / "blobs" / Digest.of(WEIGHTS).file_name
    with connected(port) as client, path.open("r+b") as file:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**17)
        client.sendall(GET % BLOB)
        assert client.recv(100)
        file.truncate(100)
        assert len(rest(client)) < len(WEIGHTS)
        file.seek(0)
        file.write(WEIGHTS)
    with connected(port) as client:
        client.sendall(GET % BLOB)
        assert answer(client)[1] == WEIGHTS


def test_files_of_clients_that_go_away_are_closed(port: int) -> None:
    def blobs() -> int:
        name = Digest.of(WEIGHTS).file_name
        links = Path("/proc/self/fd").iterdir()
        return sum(link.resolve().name == name for link in links)

    for _ in range(5):
        with connected(port) as client:
            client.sendall(GET % BLOB)
            assert client.recv(100)
    while blobs():
        pass


@pytest.mark.parametrize("length", [b"Content-Length: 1000000", b"Transfer-Encoding: chunked"])
def test_a_body_is_not_waited_for(port: int, length: bytes) -> None:
    with connected(port) as client:
        client.sendall(GET.replace(b"\r\n\r\n", b"\r\n" + length + b"\r\n\r\n") % b"/v2/")
        assert answer(client)[1] == b"{}"


@pytest.mark.parametrize(("nbytes", "status"), [(20_000, b"431"), (200_000, b"400")])
def test_a_large_head_is_refused(port: int, nbytes: int, status: bytes) -> None:
    with connected(port) as client:
        with suppress(ConnectionError):
            client.sendall(
                GET.replace(b"\r\n\r\n", b"\r\nX: " + b"y" * nbytes + b"\r\n\r\n") % b"/"
            )
        assert rest_of_head(client)[9:12] in (status, b"")


def rest_of_head(client: socket.socket) -> bytes:
    with suppress(ConnectionError):
        return client.recv(100)
    return b""


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/1.1\r\n\x00: y\r\n\r\n"]
)
def test_what_is_not_http_is_refused(port: int, garbage: bytes) -> None:
    with connected(port) as client:
        client.sendall(garbage)
        assert rest(client)[:13] in (b"", b"HTTP/1.1 400 ")


def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0)
    with running(_empty) as port, connected(port) as client:
        client.sendall(GET % b"/")
        assert rest(client).startswith(b"HTTP/1.1 204 ")


def test_too_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_CONNECTIONS", 3)
    with running(_empty) as port:
        clients = [connected(port) for _ in range(2)]
        for client in clients:
            client.sendall(GET % b"/")
            assert client.recv(12) == b"HTTP/1.1 204"
        with connected(port) as third:
            third.sendall(GET % b"/")
            assert third.recv(12) == b"HTTP/1.1 503"
        for client in clients:
            client.close()


async def _empty(_scope: Any, _receive: Any, send: Any) -> None:
    await asyncio.sleep(0)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})
