"""A server never makes us read more than the header and 128 KiB, or longer than allowed.

Bytes are counted where they leave a socket. The server's own count shows that this is the truth and
that the connection is closed: it is as much, and what the kernels between hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from threading import Event

import pytest
from support.corpus import refusal
from support.remotes import Remote, open_all
from support.retry_policies import patient_policy
from support.servers import (
    KEEP_ALIVE,
    WAIT,
    Answer,
    Asked,
    Server,
    head,
    one_after_another,
    part,
    redirect,
    reply,
    server as run_server,
)

from blobstore.errors import (
    BlobStoreError,
    HeaderError,
    LimitExceededError,
    RemoteError,
)
from blobstore.formats.safetensors.header import header_of as read_header
from blobstore.io.budget import Budget
from blobstore.source.web import WebFolder

from .test_reader import safetensors_file

KIB = 2**10
LINUX_RECEIVE_BUFFER = 6 * 2**20
SIZES = [100, 64 * KIB - 8, 300 * KIB]
ZEROS = bytes(64 * KIB)
TB = 10**12
"""More than any test reads."""


def whole(data: bytes) -> Answer:
    """A file of 1 TB, whatever was asked for."""
    return lambda _: chain([head(200, f"Content-Length: {TB}") + data], repeat(ZEROS))


def chunked(data: bytes) -> Answer:
    """The same in chunks that do not end."""
    begin = head(200, "Transfer-Encoding: chunked") + b"%x\r\n%b\r\n" % (len(data), data)
    return lambda _: chain([begin], repeat(b"10000\r\n" + ZEROS + b"\r\n"))


def tiny_chunks(data: bytes) -> Answer:
    """Chunks of four bytes each: nine bytes for four."""
    framed = b"".join(b"4\r\n%b\r\n" % data[at : at + 4].ljust(4) for at in range(0, len(data), 4))
    return lambda _: chain(
        [head(200, "Transfer-Encoding: chunked") + framed], repeat(b"4\r\n0000\r\n" * 1000)
    )


def talkative_part(data: bytes) -> Answer:
    """The right part, and then more and more."""
    return lambda asked: chain(part(asked, data)[:1], repeat(ZEROS))


def overlong_part(data: bytes) -> Answer:
    """A part in chunks that has more bytes than it says."""
    lines = ("Content-Range: bytes 0-65535/100000000", "Transfer-Encoding: chunked")
    return lambda _: chain([head(206, *lines)], repeat(b"10000\r\n" + ZEROS + b"\r\n"))


def other_part(data: bytes) -> Answer:
    """A part that begins where it should and does not end there."""
    return lambda _: chain(
        [head(206, f"Content-Range: bytes 0-{TB - 1}/{TB}", f"Content-Length: {TB}")], repeat(ZEROS)
    )


def endless_head(_: bytes) -> Answer:
    """Field lines without end."""
    return lambda _: chain([b"HTTP/1.1 206 Partial Content\r\n"], repeat(b"X: y\r\n" * 1000))


def endless_line(_: bytes) -> Answer:
    """One field without end."""
    return lambda _: chain([b"HTTP/1.1 206 Partial Content\r\nX: "], repeat(b"y" * 10_000))


def interim_replies(_: bytes) -> Answer:
    """Interim replies without end, and never a final one (RFC 9110 section 15.2)."""
    return lambda _: repeat(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 100)


def fat_errors(_: bytes) -> Answer:
    """Failures to try again, each with a head of 60 KB."""
    return lambda _: reply(503, *(f"X-{n}: {'x' * 6000}" for n in range(10)))


def fat_redirects(_: bytes) -> Answer:
    """Redirects, each with a head of 60 KB."""
    return lambda asked: [
        redirect(f"/{asked.number}")[0].replace(
            b"\r\n\r\n", b"\r\nX: " + b"x" * 60_000 + b"\r\n\r\n"
        ),
        KEEP_ALIVE,
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that counts."""
    with run_server(counting=True) as running:
        yield running


Make = Callable[[bytes], Answer]
ANSWERS = [whole, chunked, tiny_chunks, talkative_part, overlong_part, other_part]
HEADS = [endless_head, endless_line, interim_replies, fat_errors, fat_redirects]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", ANSWERS)
def test_endless_bodies(make: Make, size: int, server: Server, remote: Remote) -> None:
    check_taken(make(safetensors_file(size)), size, server, remote)


@pytest.mark.parametrize("make", HEADS)
def test_endless_heads(make: Make, server: Server, remote: Remote) -> None:
    check_taken(make(b""), 0, server, remote)


def check_taken(answer: Answer, size: int, server: Server, remote: Remote) -> None:
    """Open and read what ``answer`` gives, and check both counts.

    The kernels may hold any part of their buffers.
    """
    script = server.play(answer)
    limits = remote.limits(0)
    try:
        header = read_header(remote.open(server.url, limits))
    except BlobStoreError:
        pass
    else:
        assert list(header.tensors) == ["a"]
    assert limits.taken <= size + 8 + 128 * KIB
    assert script.sent <= size + 8 + LINUX_RECEIVE_BUFFER


# Time


@pytest.mark.parametrize("length", [0, 20, 100], ids=["nothing", "half a head", "a head"])
def test_a_server_that_falls_silent(length: int, server: Server) -> None:
    def answer(asked: Asked) -> Iterator[bytes]:
        begin = part(asked, bytes(100))[0].partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        return chain([begin[:length]] if length else [], repeat(WAIT))

    server.play(answer)
    with Remote(retry_policy=patient_policy(silence_s=0.06, attempts=2, backoff_s=0.001)) as client:
        error = refusal(lambda: read_header(client.open(server.url)))
    assert isinstance(error, RemoteError)
    assert (error.temporary, "sent nothing for 0.06 seconds" in str(error)) == (True, True)


def test_the_deadline_is_for_all_attempts(server: Server) -> None:
    """A million attempts would take a quarter of an hour, with waits of a millisecond."""
    retry_policy = patient_policy(
        deadline_s=0.1, slowest_rate=10**9, attempts=10**6, backoff_s=0.001
    )
    server.play(lambda _: reply(503))
    with Remote(retry_policy=retry_policy) as client:
        error = refusal(lambda: client.open(server.url))
    assert isinstance(error, RemoteError)
    assert error.temporary


def test_a_large_header_gets_more_time(server: Server, remote: Remote) -> None:
    limits = remote.limits(0)
    server.play(lambda asked: part(asked, safetensors_file(300 * KIB)))
    before = limits.seconds_left("x")
    read_header(remote.open(server.url, limits))
    assert limits.seconds_left("x") > before


@pytest.mark.parametrize(
    "length", ["-5", "+5", "0x5", "5_0", " 5", "", "g", "f" * 21, "-" + "f" * 30]
)
def test_lengths_of_chunks_that_are_none(length: str, server: Server, remote: Remote) -> None:
    script = server.play(
        lambda _: [
            head(200, "Transfer-Encoding: chunked") + f"{length}\r\nabcde\r\n0\r\n\r\n".encode()
        ]
    )
    assert refusal(lambda: remote.read_page(server.url, 100)).rule == "R1"
    assert len(script.asked) == 1


# Documents


def test_a_document_is_read_up_to_its_limit(server: Server, remote: Remote) -> None:
    script = server.play(lambda _: reply(200, body=b"x" * 1000))
    assert remote.read_page(server.url, 1000)[0] == b"x" * 1000
    assert isinstance(refusal(lambda: remote.read_page(server.url, 999)), LimitExceededError)
    assert [asked.range for asked in script.asked] == [None, None]


def test_a_document_whose_connection_breaks_is_asked_for_again(
    server: Server, remote: Remote
) -> None:
    cut = [head(200, "Content-Length: 1000") + b"x" * 100]
    script = server.play(one_after_another(cut, reply(200, body=b"x" * 1000)))
    assert remote.read_page(server.url, 1000)[0] == b"x" * 1000
    assert len(script.asked) == 2

    script = server.play(lambda _: cut)
    assert isinstance(refusal(lambda: remote.read_page(server.url, 1000)), RemoteError)
    assert len(script.asked) == remote.retry_policy.attempts


@pytest.mark.parametrize("make", [whole, chunked, talkative_part, endless_head])
def test_an_endless_document(make: Make, server: Server, remote: Remote) -> None:
    script = server.play(make(b"x" * 2000))
    assert isinstance(
        refusal(lambda: remote.read_page(server.url, 1000)), LimitExceededError | RemoteError
    )
    assert script.sent <= LINUX_RECEIVE_BUFFER


# A checkpoint of many files


def names_of(count: int) -> list[str]:
    return [f"model-{number:05}.safetensors" for number in range(count)]


def test_many_servers_that_fall_silent_hold_nobody_longer_than_one(server: Server) -> None:
    """A thousand shards, each of which could be waited for for ten minutes."""
    script = server.play(lambda _: repeat(WAIT))
    budget = Budget("a checkpoint", seconds=0.3)
    with Remote(connections=4, retry_policy=patient_policy()) as remote:
        folder = WebFolder(remote, server.at(""), budget=budget)
        error = refusal(lambda: read_all(folder, names_of(1000)))
    assert isinstance(error, LimitExceededError)
    assert str(error).startswith("limit exceeded: servers sent 0 bytes for a checkpoint in ")
    assert len(script.asked) <= 4


def test_the_bytes_of_all_files_are_counted(server: Server, remote: Remote) -> None:
    data = safetensors_file(30_000)
    script = server.play(lambda asked: part(asked, data))
    folder = WebFolder(remote, server.at(""), budget=Budget("all", received=200_000))
    error = refusal(lambda: read_all(folder, names_of(1000)))
    assert isinstance(error, LimitExceededError)
    assert "for the headers and documents of all; at most 200,000" in str(error)
    assert len(script.asked) < 30


def test_a_head_that_is_wrong_ends_all_before_the_others_are_there(server: Server) -> None:
    """The first file never comes, the second is damaged: nobody waits for the first."""
    asked_for_first = Event()

    def answer(asked: Asked) -> Iterator[bytes]:
        if asked.target.endswith("00000.safetensors"):
            asked_for_first.set()
            yield from repeat(WAIT)
        asked_for_first.wait(600)
        yield from part(asked, b"\x02" + bytes(7) + b"[]")

    server.play(answer)
    with Remote(connections=2, retry_policy=patient_policy()) as remote:
        error = refusal(lambda: read_all(WebFolder(remote, server.at("")), names_of(100)))
    assert (type(error), error.rule) == (HeaderError, "F7")


def test_who_leaves_ends_the_others(server: Server) -> None:
    """The caller raises, because the first file contradicts its index, while others load."""
    first = safetensors_file(100)

    def answer(asked: Asked) -> Iterator[bytes]:
        yield from (
            part(asked, first) if asked.target.endswith("00000.safetensors") else repeat(WAIT)
        )

    script = server.play(answer)
    with Remote(connections=3, retry_policy=patient_policy()) as remote:
        folder = WebFolder(remote, server.at(""))
        with (
            pytest.raises(ZeroDivisionError),
            folder.reading(names_of(1000), read_header) as headers,
        ):
            assert len(next(headers).tensors) / 0
        assert len(script.asked) <= 4
        assert len(list(open_all(WebFolder(remote, server.at("")), names_of(1)))) == 1


def read_all(folder: WebFolder, names: list[str]) -> None:
    with folder.reading(names, lambda reader: read_header(reader, folder.budget)) as headers:
        for _ in headers:
            pass
