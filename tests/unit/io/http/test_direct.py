"""Bodies past the library give the same bytes, or errors, as through it; slow siblings; pauses."""

from __future__ import annotations

import socket

import pytest
from support.clock import Clock
from support.servers import KEEP_ALIVE, Server, head

from blobstore.errors import RemoteError
from blobstore.io.http import direct
from blobstore.io.http.client import HttpClient
from blobstore.io.http.direct import DirectBody, without_body
from blobstore.io.http.messages import Message
from blobstore.io.http.pauses import Pauses
from blobstore.io.http.siblings import Siblings
from blobstore.io.http.web_addresses import WebAddress

BODY = bytes(range(250)) * 400
LENGTH = f"Content-Length: {len(BODY)}"


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 206 OK\r\nContent-Length: 5\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nX: y\r\ncontent-length:\t5 \r\nZ: 1\r\n\r\nabcde",
        b"HTTP/1.1 404 No\nContent-Length: 5\n\n",
    ],
)
def test_the_library_sees_an_empty_body(raw: bytes) -> None:
    found = without_body(raw)
    assert found is not None
    shown, body = found
    assert shown.lower().replace(b"\t", b" ").count(b"content-length: 0") == 1
    assert len(shown) == len(raw) - len(body.first)
    assert body.length == 5


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 206 OK\r\nContent-Length: 5\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: 5\r\nContent-Length : 6\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: 5, 5\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: +5\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: 5\r\n 6\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: 5\r\n\r\nabcdef",
        b"HTTP/1.1 206 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 206 OK\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n",
        b"SSH-2.0\r\nContent-Length: 5\r\n\r\n",
    ],
)
def test_other_heads_are_the_library_s(raw: bytes) -> None:
    assert without_body(raw) is None


def read(server: Server, *, direct: bool) -> tuple[object, ...]:
    """Return what comes over a new connection: one of another test may end at any time."""
    with HttpClient() as client:
        return read_by(client, server, direct=direct)


def read_by(client: HttpClient, server: Server, *, direct: bool) -> tuple[object, ...]:
    target, limits = client.start(server.url), client.limits(2**20)
    buffer = memoryview(bytearray(len(BODY)))
    try:
        with client.once(Message("GET", direct=direct), target, limits, lambda _: None) as (
            reply,
            _,
        ):
            length = reply.length
            reply.readinto(buffer, 60, lambda _: None)
    except RemoteError as error:
        return type(error), error.temporary
    return bytes(buffer), length


@pytest.mark.parametrize(
    "chunks",
    [
        [head(200, LENGTH) + BODY, KEEP_ALIVE],
        [head(200, LENGTH), BODY[:1], BODY[1:], KEEP_ALIVE],
        [head(200, LENGTH, "Connection: close") + BODY],
        [head(200, LENGTH)[:20], head(200, LENGTH)[20:], BODY, KEEP_ALIVE],
        [b"HTTP/1.1 100 Continue\r\n\r\n" + head(200, LENGTH) + BODY, KEEP_ALIVE],
        [head(200, "Transfer-Encoding: chunked"), b"%x\r\n" % len(BODY), BODY, b"\r\n0\r\n\r\n"],
        [head(200) + BODY],
        [head(200, LENGTH) + BODY[:-1]],
        [head(200, LENGTH)],
        [head(200, LENGTH, LENGTH) + BODY],
        [head(200, LENGTH, "Content-Length: 1") + BODY],
        [head(200, LENGTH, "Transfer-Encoding: chunked") + BODY],
        [head(200, *(f"X-{i}: y" for i in range(300)), LENGTH) + BODY],
        [b"nonsense\r\n\r\n"],
        [],
    ],
)
def test_both_ways_give_the_same(server: Server, chunks: list[bytes]) -> None:
    server.play(lambda _: chunks)
    through = read(server, direct=False)
    assert read(server, direct=True) == through
    with HttpClient() as client:
        if KEEP_ALIVE in chunks:
            assert [read_by(client, server, direct=True) for _ in range(3)] == [through] * 3


def test_bytes_are_told_when_the_rest_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel fills whole parts, but what came in a part of a second is told."""
    monkeypatch.setattr(direct, "_TICK_S", 0.01)
    here, there = socket.socketpair()
    told: list[int] = []

    def came(nbytes: int) -> None:
        told.append(nbytes)
        if sum(told) == 5 and nbytes == 0:
            there.sendall(b"fghij")

    with here, there, HttpClient() as client:
        there.sendall(b"cde")
        buffer = bytearray(10)
        body = DirectBody(10, b"ab")
        body.into(memoryview(buffer), here, client.limits(2**20), lambda: 60, came)
    assert (bytes(buffer), sum(told)) == (b"abcdefghij", 10)


def test_a_slow_connection_is_found_by_its_siblings() -> None:
    clock = Clock()
    siblings = Siblings(clock)
    quick, other, slow = (siblings.start() for _ in range(3))
    clock.now = 1.0
    assert not quick.is_slow(100_000_000, 10**9)
    assert not slow.is_slow(10_000_000, 10**9)  # one sibling is too few to know
    assert not other.is_slow(90_000_000, 10**9)
    clock.now = 1.5
    assert not slow.is_slow(5_000_000, 10**9)  # it is asked once a second
    clock.now = 2.1
    assert slow.is_slow(5_000_000, 10**9)
    clock.now = 3.2
    assert not slow.is_slow(10_000_000, 10_000_000)  # it is nearly done
    clock.now = 4.3
    assert slow.is_slow(0, 10**9)  # nothing came at all


def test_requests_that_ended_count_for_a_while() -> None:
    clock = Clock()
    siblings = Siblings(clock)
    for _ in range(2):
        done = siblings.start()
        clock.now += 0.5
        done.is_slow(50_000_000, 0)
        siblings.end(done, whole=True)
    slow = siblings.start()
    clock.now += 1.1
    assert slow.is_slow(1000, 10**9)
    clock.now += 20
    assert not slow.is_slow(1000, 10**9)


def test_one_pause_is_for_all_of_an_origin() -> None:
    clock = Clock()
    pauses = Pauses(60, clock=clock)
    here, there = ("https", "a", 443), ("https", "b", 443)
    pauses.set(here, 30)
    pauses.set(here, 10)
    assert (pauses.left(here), pauses.left(there)) == (30, 0)
    assert [pauses.is_new(here), pauses.is_new(here)] == [True, False]
    clock.now = 31
    assert (pauses.left(here), pauses.is_new(here)) == (0, True)


def test_requests_wait_for_a_pause_to_end() -> None:
    clock = Clock()
    waits: list[float] = []
    pauses = Pauses(60, clock=clock)
    address = WebAddress.parse("https://a/b")

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.now += seconds
        if len(waits) == 1:  # the server asks for more meanwhile
            pauses.set(address.origin, 10)

    pauses.wait(address, sleep)
    assert waits == []
    pauses.set(address.origin, 30)
    pauses.wait(address, sleep)
    assert [30 <= waits[0] <= 31, 10 <= waits[1] <= 11] == [True, True]
    pauses.set(address.origin, 61)
    with pytest.raises(RemoteError, match="asks to wait for 61 seconds"):
        pauses.wait(address, sleep)
