"""A server never makes us read more than the header and 128 KiB, or longer than allowed.

Bytes are counted where they leave a socket. The server's own count shows that this is the truth and
that the connection is closed: it is as much, and what the kernels between hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from threading import Event

import pytest
from support.corpus import refusal
from support.retry_policies import patient_policy
from support.servers import (
    WAIT,
    Answer,
    Asked,
    Server,
    head,
    part,
    redirect,
    reply,
    server as run_server,
)

from blobstore.errors import BlobStoreError, HeaderError, LimitExceededError, RemoteError
from blobstore.formats.safetensors.header import header_of
from blobstore.io.budget import Budget
from blobstore.io.http.remote_files import Remote
from blobstore.source.web import WebFolder

from .conftest import KIB, open_all, safetensors_file

LINUX_RECEIVE_BUFFER = 6 * 2**20
ZEROS = repeat(bytes(64 * KIB))
ZERO_CHUNKS = repeat(b"10000\r\n" + bytes(64 * KIB) + b"\r\n")
TB = 10**12
"""More than any test reads."""
SIZE = 300 * KIB
FILE = safetensors_file(SIZE)
CHUNKED = head(200, "Transfer-Encoding: chunked")
TINY_CHUNKS = b"".join(b"4\r\n%b\r\n" % FILE[at : at + 4] for at in range(0, len(FILE), 4))
PART = "HTTP/1.1 206 Partial Content\r\n"
FAT = [f"X-{number}: {'x' * 6000}" for number in range(10)]


def fat_redirect(asked: Asked) -> list[bytes]:
    """Redirect with a head of 60 KB."""
    first, *rest = redirect(f"/{asked.number}")
    return [first.replace(b"\r\n\r\n", b"\r\nX: " + b"x" * 60_000 + b"\r\n\r\n"), *rest]


ENDLESS: dict[str, Answer] = {
    "a file of 1 TB": lambda _: chain([head(200, f"Content-Length: {TB}") + FILE], ZEROS),
    "chunks": lambda _: chain([CHUNKED + b"%x\r\n%b\r\n" % (len(FILE), FILE)], ZERO_CHUNKS),
    "chunks of 4 bytes": lambda _: chain([CHUNKED + TINY_CHUNKS], repeat(b"4\r\n0000\r\n" * 1000)),
    "the right part, and more": lambda asked: chain(part(asked, FILE)[:1], ZEROS),
    "a part in chunks that is longer than it says": lambda _: chain(
        [head(206, "Content-Range: bytes 0-65535/100000000", "Transfer-Encoding: chunked")],
        ZERO_CHUNKS,
    ),
    "a part that ends too late": lambda _: chain(
        [head(206, f"Content-Range: bytes 0-{TB - 1}/{TB}", f"Content-Length: {TB}")], ZEROS
    ),
    "fields": lambda _: chain([PART.encode()], repeat(b"X: y\r\n" * 1000)),
    "one field": lambda _: chain([PART.encode() + b"X: "], repeat(b"y" * 10_000)),
    "interim replies": lambda _: repeat(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 100),
    "failures with long heads": lambda _: reply(503, *FAT),
    "redirects with long heads": fat_redirect,
}


@pytest.fixture(scope="module")
def counting_server() -> Iterator[Server]:
    """A server that counts what left its socket."""
    with run_server(counting=True) as running:
        yield running


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_answer_is_read_to_the_end_of_the_header(
    name: str, counting_server: Server, remote: Remote
) -> None:
    script = counting_server.play(ENDLESS[name])
    limits = remote.limits(0)
    try:
        header = header_of(remote.open(counting_server.url, limits))
    except BlobStoreError:
        pass
    else:
        assert list(header.tensors) == ["a"]
    assert limits.taken <= SIZE + 8 + 128 * KIB
    assert script.sent <= SIZE + 8 + LINUX_RECEIVE_BUFFER


@pytest.mark.parametrize("name", ["a file of 1 TB", "chunks", "fields"])
def test_an_endless_document_is_read_to_its_limit(
    name: str, counting_server: Server, remote: Remote
) -> None:
    script = counting_server.play(ENDLESS[name])
    error = refusal(lambda: remote.read_page(counting_server.url, 1000))
    assert isinstance(error, LimitExceededError | RemoteError)
    assert script.sent <= LINUX_RECEIVE_BUFFER


# Time


@pytest.mark.parametrize("length", [0, 20, 100], ids=["nothing", "half a head", "a head"])
def test_a_server_that_falls_silent(length: int, server: Server) -> None:
    def answer(asked: Asked) -> Iterator[bytes]:
        begin = part(asked, bytes(100))[0].partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        return chain([begin[:length]] if length else [], repeat(WAIT))

    server.play(answer)
    with Remote(retry_policy=patient_policy(silence_s=0.06, attempts=2, backoff_s=0.001)) as client:
        error = refusal(lambda: header_of(client.open(server.url)))
    assert isinstance(error, RemoteError)
    assert (error.temporary, "sent nothing for 0.06 seconds" in str(error)) == (True, True)


def test_the_deadline_is_for_all_attempts(server: Server) -> None:
    """A million attempts would take a quarter of an hour, with waits of a millisecond."""
    policy = patient_policy(deadline_s=0.1, slowest_rate=10**9, attempts=10**6, backoff_s=0.001)
    server.play(lambda _: reply(503))
    with Remote(retry_policy=policy) as client:
        assert isinstance(refusal(lambda: client.open(server.url)), RemoteError)


def test_a_large_header_gets_more_time(server: Server, remote: Remote) -> None:
    limits = remote.limits(0)
    server.play(lambda asked: part(asked, FILE))
    before = limits.seconds_left("x")
    header_of(remote.open(server.url, limits))
    assert limits.seconds_left("x") > before


# A checkpoint of many files


NAMES = [f"model-{number:05}.safetensors" for number in range(1000)]


def read_all(folder: WebFolder, names: list[str] = NAMES) -> None:
    with folder.reading(names, lambda reader: header_of(reader, folder.budget)) as headers:
        for _ in headers:
            pass


def test_many_files_are_read_at_once_over_few_connections(server: Server, remote: Remote) -> None:
    script = server.play(lambda asked: part(asked, safetensors_file(100)))
    read_all(WebFolder(remote, server.at("")), NAMES[:40])
    assert len(script.asked) == 40
    assert script.connections <= 16


def test_many_servers_that_fall_silent_take_no_longer_than_one(server: Server) -> None:
    """A thousand shards, for each of which ten minutes would be allowed."""
    script = server.play(lambda _: repeat(WAIT))
    with Remote(connections=4, retry_policy=patient_policy()) as remote:
        folder = WebFolder(remote, server.at(""), budget=Budget("a checkpoint", seconds=0.3))
        error = refusal(lambda: read_all(folder))
    assert isinstance(error, LimitExceededError)
    assert str(error).startswith("limit exceeded: servers sent 0 bytes for a checkpoint in ")
    assert len(script.asked) <= 4


def test_the_bytes_of_all_files_are_counted(server: Server, remote: Remote) -> None:
    script = server.play(lambda asked: part(asked, safetensors_file(30_000)))
    error = refusal(
        lambda: read_all(WebFolder(remote, server.at(""), budget=Budget("all", received=200_000)))
    )
    assert isinstance(error, LimitExceededError)
    assert "for the headers and documents of all; at most 200,000" in str(error)
    assert len(script.asked) < 30


def test_the_first_failure_ends_all(server: Server) -> None:
    """The first file never comes, the second is damaged: the first is not waited for."""
    asked_for_first = Event()

    def answer(asked: Asked) -> Iterator[bytes]:
        if asked.target.endswith(NAMES[0]):
            asked_for_first.set()
            yield from repeat(WAIT)
        asked_for_first.wait(600)
        yield from part(asked, b"\x02" + bytes(7) + b"[]")

    server.play(answer)
    with Remote(connections=2, retry_policy=patient_policy()) as remote:
        error = refusal(lambda: read_all(WebFolder(remote, server.at(""))))
    assert (type(error), error.rule) == (HeaderError, "F7")


def test_leaving_the_block_ends_the_others(server: Server) -> None:
    """The caller raises, because the first file contradicts its index, while others load."""

    def answer(asked: Asked) -> Iterator[bytes]:
        is_first = asked.target.endswith(NAMES[0])
        yield from part(asked, safetensors_file(100)) if is_first else repeat(WAIT)

    script = server.play(answer)
    with Remote(connections=3, retry_policy=patient_policy()) as remote:
        folder = WebFolder(remote, server.at(""))
        with pytest.raises(ZeroDivisionError), folder.reading(NAMES, header_of) as headers:
            assert len(next(headers).tensors) / 0
        assert len(script.asked) <= 4
        assert len(open_all(folder, NAMES[:1])) == 1
