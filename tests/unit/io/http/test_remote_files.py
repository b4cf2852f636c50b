"""Ranges of a file in memory: what goes on, what ends it; connections that are used again."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from support.corpus import refusal
from support.remotes import Remote
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
)

from blobstore.errors import BlobStoreError, CorruptDataError, NotFoundError, RemoteError
from blobstore.io.budget import Cancellation
from blobstore.io.http.remote_files import RemoteFile, Version

KIB = 2**10
DATA = random.Random(1).randbytes(640 * KIB)
ETAG = 'ETag: "v1"'
ATTEMPTS = 8
POLICY = patient_policy(backoff_s=0.001)
SAME = Version(len(DATA), '"v1"', None)


@pytest.fixture
def client() -> Iterator[Remote]:
    with Remote("secret", connections=4, retry_policy=POLICY) as made:
        yield made


def opened(client: Remote, url: str, version: Version = SAME) -> RemoteFile:
    start = client.start(url)
    return RemoteFile(client, start, start, version)


def filled(file: RemoteFile, begin: int = 0, end: int = len(DATA)) -> bytes:
    buffer = bytearray(end - begin)
    file.fill(begin, memoryview(buffer))
    return bytes(buffer)


def filled_by_threads(file: RemoteFile, step: int) -> bytes:
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(lambda at: filled(file, at, at + step), range(0, len(DATA), step))
        return b"".join(parts)


def right(asked: Asked) -> list[bytes]:
    return part(asked, DATA, ETAG)


def cut(nbytes: int) -> Answer:
    """Answer rightly, and break off after so many bytes of the body."""

    def answer(asked: Asked) -> Iterator[bytes]:
        whole = part(asked, DATA, ETAG)[0]
        yield whole[: whole.index(b"\r\n\r\n") + 4 + nbytes]

    return answer


def chunked(asked: Asked) -> Iterator[bytes]:
    begin, end = asked.range or (0, 0)
    lines = (f"Content-Range: bytes {begin}-{end - 1}/{len(DATA)}", "Transfer-Encoding: chunked")
    yield head(206, *lines, ETAG)
    for at in range(begin, end, 10_000):
        piece = DATA[at : min(end, at + 10_000)]
        yield b"%x\r\n%b\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def test_ranges_come_over_kept_connections_with_their_version(
    server: Server, client: Remote
) -> None:
    script, file = server.play(right), opened(client, server.url)
    step = 64 * KIB
    assert b"".join(filled(file, at, at + step) for at in range(0, len(DATA), step)) == DATA
    assert script.connections == 1
    assert script.ranges == [(at, at + step) for at in range(0, len(DATA), step)]
    assert {asked.fields.get("if-range") for asked in script.asked} == {'"v1"'}


def test_many_threads_fill_many_ranges(server: Server, client: Remote) -> None:
    script = server.play(right)
    assert filled_by_threads(opened(client, server.url), 16 * KIB) == DATA
    assert script.connections <= 4


def test_a_broken_body_goes_on_where_it_broke(server: Server, client: Remote) -> None:
    script = server.play(one_after_another(cut(100 * KIB), cut(0), cut(300 * KIB), right))
    assert filled(opened(client, server.url)) == DATA
    begins = [asked[0] for asked in script.ranges if asked is not None]
    assert begins == [0, 100 * KIB, 100 * KIB, 400 * KIB]


def test_a_server_that_brings_little_is_not_asked_for_ever(server: Server, client: Remote) -> None:
    for answer in (cut(100), lambda asked: part(asked, DATA, ETAG, longest=100)):
        script = server.play(answer)
        error = refusal(lambda: filled(opened(client, server.url)))
        assert isinstance(error, RemoteError)
        assert len(script.asked) == ATTEMPTS


@pytest.mark.parametrize(
    "answer", [chunked, lambda asked: part(asked, DATA, ETAG, longest=200 * KIB)]
)
def test_other_right_answers(server: Server, client: Remote, answer: Answer) -> None:
    server.play(answer)
    assert filled(opened(client, server.url)) == DATA


def a_206(begin: int, *fields: str, size: int = len(DATA), length: int = 10) -> list[bytes]:
    text = f"Content-Range: bytes {begin}-{begin + length - 1}/{size}"
    return reply(206, text, *fields, body=DATA[:length])


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (a_206(1), RemoteError, "R1"),
        (a_206(0, length=11), RemoteError, "R1"),
        (reply(206, "Content-Range: bytes 0-9/9", body=DATA[:10]), RemoteError, "R1"),
        (reply(206, body=DATA[:10]), RemoteError, "R1"),
        (reply(200, ETAG, body=DATA), CorruptDataError, "changed"),
        (reply(416, "Content-Range: bytes */5"), CorruptDataError, "changed"),
        (a_206(0, 'ETag: "v2"'), CorruptDataError, "changed"),
        (a_206(0, ETAG, size=len(DATA) + 1), CorruptDataError, "changed"),
        (reply(404), NotFoundError, "404"),
        (reply(403), RemoteError, "403"),
        (reply(206, "Content-Encoding: gzip", body=b""), RemoteError, "coding"),
        (redirect("/model.safetensors"), RemoteError, "redirects"),
    ],
)
def test_wrong_replies_are_typed_errors(
    server: Server, client: Remote, answer: list[bytes], kind: type, says: str
) -> None:
    script = server.play(lambda _: answer)
    error = refusal(lambda: filled(opened(client, server.url), 0, 10))
    assert (type(error), says in str(error)) == (kind, True), error
    assert len(script.asked) <= 6


@pytest.mark.parametrize("nbytes", [1000, 200 * KIB])  # with the head, or behind it
@pytest.mark.parametrize("interim", [b"", b"HTTP/1.1 103 x\r\nA: b\r\n\r\n"])
def test_bytes_behind_a_reply_are_not_the_next_one(
    server: Server, client: Remote, nbytes: int, interim: bytes
) -> None:
    def answer(asked: Asked) -> Iterator[bytes]:
        first, *_ = part(asked, DATA, ETAG)
        wrong = part(replace(asked, fields={"range": f"bytes=0-{nbytes - 1}"}), DATA, ETAG)[0]
        yield interim + first + wrong
        yield KEEP_ALIVE

    script = server.play(answer)
    file = opened(client, server.url)
    for begin in (0, nbytes, 2 * nbytes):
        assert filled(file, begin, begin + nbytes) == DATA[begin : begin + nbytes]
    assert script.connections == 3


def test_a_connection_is_used_again_after_exactly_a_body(server: Server, client: Remote) -> None:
    """Also after an interim reply; not after chunks, in which more may be hidden."""

    def interim(asked: Asked) -> Iterator[bytes]:
        yield b"HTTP/1.1 103 x\r\nTransfer-Encoding: chunked\r\n\r\n"
        yield from right(asked)

    def with_end(asked: Asked) -> Iterator[bytes]:
        yield from chunked(asked)
        yield KEEP_ALIVE

    answers: list[tuple[Answer, int]] = [(right, 1), (interim, 1), (with_end, 3)]
    for answer, expected in answers:
        client.close()
        script = server.play(answer)
        for _ in range(3):
            assert filled(opened(client, server.url), 5, 100) == DATA[5:100]
        assert script.connections == expected


def test_a_server_that_closes_kept_connections(server: Server, client: Remote) -> None:
    """It does not say so before, so each connection is found closed when it is used."""

    def answer(asked: Asked) -> Iterator[bytes]:
        yield part(asked, DATA, ETAG)[0]
        raise OSError("closed")

    script, file = server.play(answer), opened(client, server.url)
    step = 64 * KIB
    assert b"".join(filled(file, at, at + step) for at in range(0, len(DATA), step)) == DATA
    assert script.connections >= 10


class SignedAddresses:
    """A server whose files lie on another one, at addresses that are good for a few requests."""

    def __init__(self, lasts: int) -> None:
        self.lasts = lasts
        self.given = self.uses = 0
        self.lock = threading.Lock()

    def origin(self, other: Server) -> Answer:
        def answer(_: Asked) -> list[bytes]:
            with self.lock:
                self.given += 1
                self.uses = 0
                where = other.at(f"signed?n={self.given}")
            return redirect(where)

        return answer

    def content(self, asked: Asked) -> list[bytes]:
        with self.lock:
            self.uses += 1
            is_good = self.uses <= self.lasts
        return right(asked) if is_good else reply(403, body=b"Request has expired")


def test_a_signed_address_is_used_until_it_expires(
    server: Server, other_server: Server, client: Remote
) -> None:
    signed = SignedAddresses(lasts=24)
    start = server.play(signed.origin(other_server))
    content = other_server.play(signed.content)
    step = 16 * KIB
    file = opened(client, server.url)
    assert b"".join(filled(file, at, at + step) for at in range(0, len(DATA), step)) == DATA
    assert (len(start.asked), signed.given) == (2, 2)
    assert [asked.fields.get("authorization") for asked in start.asked] == ["Bearer secret"] * 2
    assert {asked.fields.get("authorization") for asked in content.asked} == {None}


def test_a_signed_address_that_is_never_good_is_an_error(
    server: Server, other_server: Server, client: Remote
) -> None:
    signed = SignedAddresses(lasts=0)
    server.play(signed.origin(other_server))
    other_server.play(signed.content)
    error = refusal(lambda: filled(opened(client, server.url)))
    assert (type(error), isinstance(error, RemoteError) and error.status) == (RemoteError, 403)
    assert signed.given <= 2
    assert "?" not in str(error)


@pytest.mark.parametrize("fields", [(), ("Retry-After: 0",), ('RateLimit: "x";r=1;t=300',)])
def test_a_busy_server_is_asked_again(
    server: Server, client: Remote, fields: tuple[str, ...]
) -> None:
    script = server.play(one_after_another(*[reply(429, *fields)] * 3, right))
    assert filled_by_threads(opened(client, server.url), 64 * KIB) == DATA
    assert len(script.asked) == 13


def test_a_wait_that_is_too_long_is_an_error_with_a_hint(server: Server, client: Remote) -> None:
    script = server.play(lambda _: reply(429, 'RateLimit: "resolvers";r=0;t=600'))
    assert "asks to wait for 601" in str(refusal(lambda: filled(opened(client, server.url))).hint)
    assert len(script.asked) == 1


@pytest.mark.parametrize("is_begun", [False, True])
def test_cancelling_ends_all(server: Server, client: Remote, *, is_begun: bool) -> None:
    waiting = threading.Barrier(3)

    def answer(asked: Asked) -> Iterator[bytes]:
        if is_begun:
            yield next(iter(cut(1000)(asked)))
        waiting.wait(600)
        while True:
            yield WAIT

    server.play(answer)
    cancellation, buffer = Cancellation(), memoryview(bytearray(len(DATA)))

    def fill(name: str) -> None:
        opened(client, server.at(name)).fill(0, buffer, cancellation=cancellation)

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(refusal, partial(fill, name)) for name in "ab"]
        waiting.wait(600)
        cancellation.cancel()
        assert {type(one.result(600)) for one in running} == {RemoteError}
    assert "cancelled" in str(refusal(partial(fill, "c")))


FAULTS: list[Answer] = [
    *[right] * 12,
    *(cut(0), cut(70 * KIB), cut(100 * KIB), chunked),
    lambda asked: right(asked)[:1],  # the connection ends behind a right reply
    lambda _: [],
    lambda _: reply(500, body=b"broken"),
    lambda _: reply(503, "Retry-After: 0"),
    lambda _: reply(429, 'RateLimit: "x";r=1;t=300'),
    lambda asked: part(asked, DATA, ETAG, longest=65 * KIB),
    lambda asked: [right(asked)[0][:30]],
]
FATAL: list[Answer] = [
    lambda asked: part(asked, DATA[1:], ETAG),
    lambda asked: part(asked, DATA, 'ETag: "v2"'),
    lambda _: reply(404),
    lambda _: reply(206, body=b"x"),
    lambda _: reply(412),
    lambda _: redirect("/elsewhere", 308),
]


@pytest.mark.parametrize("seed", range(12))
def test_faults_in_any_order_give_the_bytes_or_a_typed_error(
    server: Server, client: Remote, seed: int
) -> None:
    choose, lock = random.Random(seed), threading.Lock()
    has_fatal = seed % 4 == 0

    def answer(asked: Asked) -> Iterable[bytes]:
        with lock:
            is_fatal = has_fatal and choose.random() < 0.1
            return choose.choice(FATAL if is_fatal else FAULTS)(asked)

    server.play(answer)
    file, step = opened(client, server.url), 160 * KIB
    outcomes: list[bytes | BlobStoreError] = []

    def fetch(begin: int) -> None:
        try:
            outcomes.append(filled(file, begin, begin + step))
        except (RemoteError, CorruptDataError, NotFoundError) as error:
            outcomes.append(error)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fetch, range(0, len(DATA), step)))
    expected = {DATA[begin : begin + step] for begin in range(0, len(DATA), step)}
    assert {one for one in outcomes if isinstance(one, bytes)} <= expected
    assert len(outcomes) == 4
    errors = [str(one) for one in outcomes if not isinstance(one, bytes)]
    assert has_fatal or not errors


def test_a_chunk_whose_length_wraps_around_elsewhere(server: Server, client: Remote) -> None:
    script = server.play(
        lambda _: [head(200, "Transfer-Encoding: chunked") + b"8000000000000000\r\n"]
    )
    assert refusal(lambda: client.read_page(server.url, 1000)).rule == "R1"
    assert len(script.asked) == 1
