"""A server never makes us read more than the header and 128 KiB, or longer than allowed.

Bytes are counted where they leave a socket. The server's own count shows that this is the truth and
that the connection is closed: it is as much, and what the kernels between hold.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from threading import Event

import pytest
from support.corpus import refusal
from support.retry_policies import patient_policy
from support.servers import WAIT, Answer, Asked, Server, head, part, redirect, reply

from blobstore.errors import BlobStoreError, HeaderError, LimitExceededError, RemoteError
from blobstore.formats.safetensors.header import header_of
from blobstore.io.budget import Budget
from blobstore.io.http.remote_files import Remote
from blobstore.source.web import WebFolder

from .conftest import KIB, RETRY_POLICY, safetensors_file

BUFFERS = 64 * 2**20
"""More than kernels keep of a connection that nobody reads."""
ZEROS = repeat(bytes(64 * KIB))
TB = 10**12
SIZE = 300 * KIB
FILE = safetensors_file(SIZE)
FAT = "X: " + "x" * 60_000

ENDLESS: dict[str, Answer] = {
    "the right part, and more": lambda asked: chain(part(asked, FILE)[:1], ZEROS),
    "a part that ends too late": lambda _: chain(
        [head(206, f"Content-Range: bytes 0-{TB - 1}/{TB}", f"Content-Length: {TB}")], ZEROS
    ),
    "fields": lambda _: chain([head(206)[:-2]], repeat(b"X: y\r\n" * 1000)),
    "one field": lambda _: chain([head(206)[:-2] + b"X: "], repeat(b"y" * 10_000)),
    "interim replies": lambda _: repeat(head(103, "Link: x") * 10),
    "failures with long heads": lambda _: reply(503, FAT),
    "redirects with long heads": lambda asked: [
        redirect(f"/{asked.number}")[0].replace(b"\r\n\r\n", f"\r\n{FAT}\r\n\r\n".encode())
    ],
}


@pytest.mark.parametrize("answer", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_answer_is_read_in_part(answer: Answer, server: Server, remote: Remote) -> None:
    script = server.play(answer)
    limits = remote.limits(0)
    with suppress(BlobStoreError):
        assert list(header_of(remote.open(server.url, limits)).tensors) == ["a"]
    assert limits.taken <= SIZE + 8 + 128 * KIB
    assert script.sent <= SIZE + 8 + BUFFERS


# Time


def test_a_server_that_falls_silent(server: Server) -> None:
    server.play(lambda _: chain([head(206)[:20]], repeat(WAIT)))
    with Remote(retry_policy=patient_policy(silence_s=0.06, attempts=2, backoff_s=0.001)) as client:
        error = refusal(lambda: client.open(server.url))
    assert isinstance(error, RemoteError)
    assert (error.temporary, "0.06 seconds" in str(error)) == (True, True)


@pytest.mark.parametrize(
    "answer",
    [
        lambda asked: chain.from_iterable(
            (bytes([byte]), WAIT) for byte in part(asked, FILE[:100])[0]
        ),
        lambda _: reply(503),
    ],
    ids=["a byte every 20 ms", "a million failures"],
)
def test_the_deadline_is_for_the_whole_request(answer: Answer, server: Server) -> None:
    script = server.play(answer)
    policy = replace(RETRY_POLICY, deadline_s=0.1, slowest_rate=10**9, attempts=10**6)
    with Remote(retry_policy=policy) as client:
        assert isinstance(refusal(lambda: client.open(server.url)), RemoteError)
    assert len(script.asked) < 10_000


# A checkpoint of many files


NAMES = [f"model-{number:05}.safetensors" for number in range(1000)]


def read_all(folder: WebFolder, names: list[str] = NAMES) -> None:
    with folder.read_each(names, lambda reader: header_of(reader, folder.budget)) as headers:
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
        assert isinstance(refusal(lambda: read_all(folder)), LimitExceededError)
    assert len(script.asked) <= 4


def test_the_bytes_of_all_files_are_counted(server: Server, remote: Remote) -> None:
    script = server.play(lambda asked: part(asked, safetensors_file(30_000)))
    folder = WebFolder(remote, server.at(""), budget=Budget("all", received=200_000))
    assert isinstance(refusal(lambda: read_all(folder)), LimitExceededError)
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
