"""Connections on real sockets: files without a copy, and clients that are slow or send too much."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from support.clock import Clock

from blobstore.web.connection import Connection, Limits
from blobstore.web.file_sending import SENDS_FILES
from blobstore.web.server import _config

DATA = os.urandom(3 * 2**20)
GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
PATIENCE_S = 300


class Files:
    """An application that sends parts of a file, and counts requests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[str] = []
        self.errors: list[BaseException] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        if scope["path"] == "/text":
            await PlainTextResponse("text")(scope, receive, send)
            return
        begin, end = map(int, scope["query_string"].split(b"-"))
        assert SENDS_FILES in scope["extensions"]
        nbytes = str(end - begin).encode()
        fields = [] if scope["path"] == "/chunked" else [(b"content-length", nbytes)]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": fields})
            with self.path.open("rb") as file:
                part = {"file": file, "offset": begin, "count": end - begin, "more_body": True}
                await send({"type": SENDS_FILES, **part})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except BaseException as error:
            self.errors.append(error)
            raise


class Running:
    """A server in a thread of its own, and its connections. Its time passes by `advance` only."""

    def __init__(self, app: Any, limits: Limits) -> None:
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._clock = Clock()
        self._loop.time = self._clock  # type: ignore[method-assign]
        self._threads = ThreadPoolExecutor(4)
        config = _config(app, limits, self._threads)
        config.load()
        self.state = uvicorn.server.ServerState()
        made = partial(
            Connection,
            limits=limits,
            threads=self._threads,
            config=config,
            server_state=self.state,
            app_state={},
            _loop=self._loop,
        )
        self._server = self._loop.run_until_complete(self._loop.create_server(made, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def connect(self, *, receives: int | None = None) -> socket.socket:
        client = socket.socket()
        client.settimeout(PATIENCE_S)
        if receives is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        client.connect(("127.0.0.1", self.port))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each byte is there at once
        return client

    @property
    def seconds(self) -> float:
        """How much time has passed."""
        return self._clock.now

    def call(self, function: Callable[[], Any]) -> Any:
        async def called() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(PATIENCE_S)

    def advance(self, seconds: float) -> None:
        """Let time pass, and do what is due."""
        self._clock.now += seconds
        self.call(lambda: None)

    def stop(self, meanwhile: Callable[[], Any]) -> None:
        """Stop for an hour after the loop's next look at its sockets, and before that at timers."""
        selector: Any = self._loop._selector  # type: ignore[attr-defined]
        select = selector.select

        def stopped(timeout: float | None) -> Any:
            found = select(timeout)
            selector.select = select
            meanwhile()
            self._clock.now += 3600
            return found

        self.call(lambda: setattr(selector, "select", stopped))

    def close(self) -> None:
        def end() -> None:
            self._server.close()
            for connection in list(self.state.connections):
                connection.transport.abort()

        self.call(end)
        while self.call(lambda: len(self.state.connections) + len(self.state.tasks)):
            pass
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()
        self._threads.shutdown()


@contextmanager
def running(app: Any, **limits: Any) -> Iterator[Running]:
    server = Running(app, Limits(**limits))
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    (tmp_path / "file").write_bytes(DATA)
    return Files(tmp_path / "file")


def answer(client: socket.socket) -> tuple[bytes, bytes]:
    """Return the head and the body of an answer with a length."""
    got = b""
    while b"\r\n\r\n" not in got:
        piece = client.recv(2**16)
        assert piece, f"closed after {got!r}"
        got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    (length,) = (
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    )
    while len(body) < length:
        piece = client.recv(2**20)
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


def rest_in_time(server: Running, client: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection; time passes while none come."""
    got = b""
    client.settimeout(0.01)
    with suppress(ConnectionError):
        while True:
            try:
                piece = client.recv(2**20)
            except TimeoutError:
                assert server.seconds < PATIENCE_S, "the connection stays"
                server.advance(0.05)
                continue
            if not piece:
                break
            got += piece
    return got


def test_files_come_whole_and_in_parts(files: Files) -> None:
    with running(files) as server, server.connect() as client:
        for begin, end in ((0, len(DATA)), (5, 5), (7, 2**20), (len(DATA) - 1, len(DATA))):
            client.sendall(GET % f"/file?{begin}-{end}".encode())
            assert answer(client)[1] == DATA[begin:end]
        client.sendall(GET % b"/text")
        assert answer(client)[1] == b"text"


def test_a_body_without_a_length_is_framed(files: Files) -> None:
    with running(files) as server, server.connect() as client:
        client.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") % b"/chunked?1-9")
        assert rest(client).endswith(b"\r\n\r\n8\r\n%s\r\n0\r\n\r\n" % DATA[1:9])


def test_requests_in_advance_are_answered_in_order(files: Files) -> None:
    with running(files) as server, server.connect() as client:
        client.sendall(GET % b"/file?0-1000000" + GET % b"/text" + GET % b"/file?3-4")
        assert [answer_from(client, number) for number in range(3)] == [
            DATA[:1000000],
            b"text",
            DATA[3:4],
        ]


def answer_from(client: socket.socket, _number: int) -> bytes:
    """Return one body, and leave what follows it."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += client.recv(1)
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    body = b""
    while len(body) < length:
        body += client.recv(length - len(body))
    return body


def test_many_clients_at_once(files: Files) -> None:
    def asked(number: int) -> bytes:
        with server.connect() as client:
            client.sendall(GET % f"/file?{number}-{number + 300_000}".encode())
            return answer(client)[1]

    with running(files) as server, ThreadPoolExecutor(16) as clients:
        found = list(clients.map(asked, range(32)))
    assert found == [DATA[number : number + 300_000] for number in range(32)]


def number_of_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_of_clients_that_go_away_are_closed(files: Files) -> None:
    with running(files) as server:
        before = number_of_descriptors()
        for _ in range(5):
            client = server.connect(receives=4096)
            client.sendall(GET % f"/file?0-{len(DATA)}".encode())
            assert client.recv(100)
            client.close()
        while server.call(lambda: len(server.state.connections) + len(server.state.tasks)):
            pass
        while number_of_descriptors() > before:
            pass
    assert len(files.asked) == 5


def test_a_file_that_was_cut_ends_the_connection(files: Files) -> None:
    with running(files) as server, server.connect() as client:
        client.sendall(GET % f"/file?0-{len(DATA) + 10}".encode())
        assert len(rest(client).partition(b"\r\n\r\n")[2]) <= len(DATA)
    with running(files) as server, server.connect() as client:
        client.sendall(GET % b"/text")
        assert answer(client)[1] == b"text"


SLOW = {"request_s": 0.2, "stall_s": 0.2}


@pytest.mark.parametrize("head", [b"", b"GET /text HT", b"GET /text HTTP/1.1\r\nX: y\r\n"])
def test_a_head_has_to_come_in_time(files: Files, head: bytes) -> None:
    with running(files, **SLOW) as server, server.connect() as client:
        client.sendall(head)
        assert rest_in_time(server, client) == b""
        assert files.asked == []


def test_what_came_while_the_server_was_stopped_is_read(files: Files) -> None:
    with running(files) as server, server.connect() as client:
        while not server.call(lambda: len(server.state.connections)):
            pass
        server.stop(lambda: client.sendall(GET % b"/text"))
        assert answer(client)[1] == b"text"


def test_a_byte_now_and_then_does_not_help(files: Files) -> None:
    stop = threading.Event()

    def trickle(client: socket.socket) -> None:
        with suppress(OSError):
            while not stop.wait(0.001):
                client.sendall(b"x")
                server.advance(0.02)

    with running(files, **SLOW) as server, server.connect() as client:
        client.sendall(GET % b"/text")
        assert answer(client)[1] == b"text"
        client.sendall(b"GET /text HTTP/1.1\r\nX: ")
        thread = threading.Thread(target=trickle, args=(client,))
        thread.start()
        assert rest(client) == b""
        stop.set()
        thread.join()
        assert files.asked == ["/text"]
        assert server.seconds < 10  # it was not closed for the length of its head


def test_a_client_that_does_not_read_is_dropped(files: Files) -> None:
    nbytes = 2**28  # more than the system keeps for a socket; zeros, which take no space
    os.truncate(files.path, nbytes)
    with running(files, **SLOW) as server, server.connect(receives=4096) as client:
        client.sendall(GET % f"/file?0-{nbytes}".encode())
        while not files.asked:
            pass
        while server.call(lambda: len(server.state.connections)):
            server.advance(0.01)
        assert len(rest(client)) < nbytes


def test_a_slow_client_that_reads_is_served(files: Files) -> None:
    nbytes = 2**28  # the server always waits for it
    os.truncate(files.path, nbytes)
    with running(files, stall_s=1, stall_nbytes=1000) as server:
        with server.connect(receives=4096) as client:
            client.sendall(GET % f"/file?0-{nbytes}".encode())
            count = 0
            while server.seconds < 10:
                count += (now := len(client.recv(1000)))
                assert now, "closed"
                server.advance(now / 20_000)  # it takes far more than the least in each second
        assert count >= 190_000


def test_an_idle_connection_is_closed(files: Files) -> None:
    with running(files, idle_s=0.1) as server, server.connect() as client:
        client.sendall(GET % b"/text")
        assert answer(client)[1] == b"text"
        assert rest_in_time(server, client) == b""


@pytest.mark.parametrize("length", [b"Content-Length: 1000000000", b"Transfer-Encoding: chunked"])
def test_a_body_is_not_read(files: Files, length: bytes) -> None:
    with running(files) as server, server.connect() as client:
        client.sendall(GET.replace(b"\r\n\r\n", b"\r\n" + length + b"\r\n\r\n") % b"/text")
        head, body = answer(client)
        assert body == b"text"
        assert b"connection: close" in head
        assert rest(client) == b""


def test_a_large_head_is_refused(files: Files) -> None:
    with running(files, head_nbytes=1000) as server, server.connect() as client:
        client.sendall(GET.replace(b"\r\n\r\n", b"\r\nX: " + b"y" * 2000) % b"/text")
        assert rest(client).startswith(b"HTTP/1.1 400 ")
    assert files.asked == []


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\x00: y\r\n\r\n"]
)
def test_what_is_not_http_is_refused(files: Files, garbage: bytes) -> None:
    with running(files, **SLOW) as server, server.connect() as client:
        client.sendall(garbage)
        assert rest_in_time(server, client)[:13] in (b"", b"HTTP/1.1 400 ")


def test_too_many_connections(files: Files) -> None:
    with running(files, connections=2) as server:
        clients = [server.connect() for _ in range(6)]
        while server.call(lambda: len(server.state.connections)) < 4:
            pass
        refused = rest(clients[4]) + rest(clients[5])
        clients[0].sendall(GET % b"/text")
        head, _ = answer(clients[0])
        assert (refused, head.split(b"\r\n")[0]) == (b"", b"HTTP/1.1 503 Service Unavailable")
        for client in clients:
            client.close()
        while server.call(lambda: len(server.state.connections)):
            pass
        with server.connect() as client:
            client.sendall(GET % b"/text")
            assert answer(client)[1] == b"text"
