"""The server on real sockets: where it can be, what clients may send, and signals."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import parse_headers
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import pytest
from support.stores import commit_model

import blobstore
from blobstore.errors import UsageError
from blobstore.names import Digest
from blobstore.web import application as server
from blobstore.web.application import Hosts, application, serve_at
from blobstore.web.distribution import distribution_routes

WEIGHTS = bytes(range(251)) * 100_000  # more than the buffers of two sockets hold
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
BLOB = f"/v2/library/tiny/blobs/{Digest.of(WEIGHTS)}".encode()
FILE = Digest.of(WEIGHTS).file_name
PATIENCE_S = 300


def talk_to(app: Any, talk: Callable[[int], None], *, ends: bool = True, log: bool = False) -> None:
    """Serve here; call ``talk`` with the port in a thread; ``ends``: interrupt the server then."""
    addresses: SimpleQueue[str] = SimpleQueue()

    def client() -> None:
        try:
            talk(int(addresses.get().rstrip("/").rpartition(":")[2]))
        finally:
            if ends:
                os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        talked = threads.submit(client)
        serve_at(app, "127.0.0.1", 0, ready=addresses.put, log=log)
        talked.result()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = blobstore.open_store(tmp_path_factory.mktemp("server") / "store")
    commit_model(store, "tiny:x", WEIGHTS)
    return store.root


@pytest.fixture
def app(root: Path) -> Any:
    store = blobstore.open_store(root)
    return application(store, Hosts("127.0.0.1"), more=distribution_routes(store))


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


def answer(reader: BinaryIO) -> bytes:
    """Return the body of an answer with a length; a reader may have read what follows."""
    assert reader.readline().startswith(b"HTTP/1.1 ")
    return reader.read(int(parse_headers(reader)["content-length"]))


def rest(client: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection, in whatever way."""
    got = b""
    with suppress(ConnectionError):
        while piece := client.recv(2**20):
            got += piece
    return got


def test_requests_follow_in_one_connection_and_a_body_is_not_waited_for(
    app: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def talk(port: int) -> None:
        with connected(port) as client:
            client.sendall(GET % BLOB + GET % b"/v2/" + GET % BLOB)
            reader = client.makefile("rb")
            assert [answer(reader) for _ in range(3)] == [WEIGHTS, b"{}", WEIGHTS]
        for length in (b"Content-Length: 1000000", b"Transfer-Encoding: chunked"):
            with connected(port) as client:
                client.sendall(GET.replace(b"\r\n\r\n", b"\r\n" + length + b"\r\n\r\n") % b"/v2/")
                assert answer(client.makefile("rb")) == b"{}"

    talk_to(app, talk)
    assert capsys.readouterr().err == ""


def test_requests_are_logged(app: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def talk(port: int) -> None:
        with connected(port) as client:
            client.sendall(GET % b"/nothing%0A")
            answer(client.makefile("rb"))

    talk_to(app, talk, log=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith('"GET /nothing%0A HTTP/1.1" 404 Not Found')


def test_a_blob_that_is_cut_ends_the_connection(root: Path, app: Any) -> None:
    def talk(port: int) -> None:
        with connected(port) as client, (root / "blobs" / FILE).open("r+b") as file:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**17)
            client.sendall(GET % BLOB)
            assert client.recv(100)
            file.truncate(100)
            assert len(rest(client)) < len(WEIGHTS)
            file.seek(0)
            file.write(WEIGHTS)
        with connected(port) as client:
            client.sendall(GET % BLOB)
            assert answer(client.makefile("rb")) == WEIGHTS

    talk_to(app, talk)


def test_files_of_clients_that_go_away_are_closed(app: Any) -> None:
    def talk(port: int) -> None:
        for _ in range(5):
            with connected(port) as client:
                client.sendall(GET % BLOB)
                assert client.recv(100)
        while any(link.resolve().name == FILE for link in Path("/proc/self/fd").iterdir()):
            pass

    talk_to(app, talk)


def test_what_is_refused(app: Any) -> None:
    def talk(port: int) -> None:
        for sent, status in (
            (GET.replace(b"\r\n\r\n", b"\r\nX: " + b"y" * 20_000 + b"\r\n\r\n") % b"/", b" 431"),
            (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b" 400"),  # TLS
            (b"GET / HTTP/1.1\r\n\x00: y\r\n\r\n", b" 400"),
        ):
            with connected(port) as client:
                with suppress(ConnectionError):
                    client.sendall(sent)
                    client.shutdown(socket.SHUT_WR)
                assert rest(client)[8:12] in (status, b"")

    talk_to(app, talk)


async def empty(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0)

    def talk(port: int) -> None:
        with connected(port) as client:
            client.sendall(GET % b"/")
            assert rest(client).startswith(b"HTTP/1.1 204 ")

    talk_to(empty, talk)


def test_an_address_that_is_not_the_machines() -> None:
    for host, says in {
        "192.0.2.1": "not an address of this machine",  # RFC 5737: of no machine
        "no such host": "not an address or a known name",
    }.items():
        with pytest.raises(UsageError, match=says):
            serve_at(empty, host, 0, ready=pytest.fail)


def test_a_second_interrupt_ends_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "END_S", 3600)
    in_flight: SimpleQueue[None] = SimpleQueue()

    async def silent(_scope: Any, _receive: Any, _send: Any) -> None:
        in_flight.put(None)
        await asyncio.Event().wait()

    def talk(port: int) -> None:
        with connected(port) as idle, connected(port) as client:
            client.sendall(GET % b"/")
            in_flight.get()
            os.kill(os.getpid(), signal.SIGINT)
            assert idle.recv(1) == b""  # so the signal was seen
            os.kill(os.getpid(), signal.SIGINT)
            assert client.recv(12) in (b"", b"HTTP/1.1 500")  # uvicorn cancels what has not begun

    before = signal.getsignal(signal.SIGINT)
    talk_to(silent, talk, ends=False)
    assert signal.getsignal(signal.SIGINT) is before
