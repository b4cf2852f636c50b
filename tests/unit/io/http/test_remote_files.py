"""Files on servers: which bytes are asked for, and what ends or repeats a read."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from support.corpus import refusal
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

from blobstore.errors import CorruptDataError, RemoteError, ShortReadError
from blobstore.formats.safetensors.header import header_of
from blobstore.io.budget import Cancellation
from blobstore.io.http.remote_files import Remote, RemoteFile, Version

from .conftest import KIB, safetensors_file

SMALL = safetensors_file(1000)
LARGE = safetensors_file(200 * KIB)
DATA = random.Random(1).randbytes(640 * KIB)
ETAG = 'ETag: "v1"'
ATTEMPTS = 8


# Opening a file


def test_an_empty_file(server: Server, remote: Remote) -> None:
    for answer in (reply(416, "Content-Range: bytes */0"), reply(200)):
        server.play(answer)
        assert remote.open(server.url).size == 0
    server.play(reply(416, "Content-Range: bytes */66"))
    assert refusal(lambda: remote.open(server.url)).rule == "R1"


def large(line: str) -> Answer:
    return lambda asked: part(asked, LARGE, line)


def test_if_range_is_sent_with_a_strong_validator_only(server: Server, remote: Remote) -> None:
    for line, condition in (
        ('ETag: "v1"', '"v1"'),
        ('ETag: W/"v1"', None),
        ("ETag: v1", None),
        ("Last-Modified: Sat, 21 Nov 2026 10:00:00 GMT", None),
    ):
        script = server.play(large(line))
        header_of(remote.open(server.url))
        assert [asked.fields.get("if-range") for asked in script.asked] == [None, condition]
    for line in ('ETag: W/"{}"', "Last-Modified: Sat, 21 Nov 2026 10:00:0{} GMT"):
        answers = [large(line.format(number)) for number in range(2)]
        server.play(one_after_another(*answers))
        assert isinstance(refusal(lambda: header_of(remote.open(server.url))), CorruptDataError)


# Files that end early, or have no size


def of_unknown_size(asked: Asked, data: bytes = LARGE) -> list[bytes]:
    return [part(asked, data)[0].replace(b"/%d\r\n" % len(data), b"/*\r\n"), KEEP_ALIVE]


def in_chunks(begin: bytes, data: bytes) -> list[bytes]:
    """Return a reply with ``data`` in chunks of up to 10,000 bytes."""
    pieces = [data[at : at + 10_000] for at in range(0, len(data), 10_000)]
    return [begin, *[b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces], b"0\r\n\r\n"]


CHUNKED = "Transfer-Encoding: chunked"


def test_a_file_that_ends_too_early_is_an_error(server: Server, remote: Remote) -> None:
    def answer(asked: Asked) -> list[bytes]:
        if asked.range is not None and asked.range[0] >= 100 * KIB:
            return reply(416)
        return of_unknown_size(asked, LARGE[: 100 * KIB])

    server.play(answer)
    error = refusal(lambda: header_of(remote.open(server.url)))
    assert isinstance(error, ShortReadError)
    assert f"{len(LARGE) - 4:,}" in str(error)
    server.play([head(200, "Content-Length: 5000") + SMALL[:500]])
    assert isinstance(refusal(lambda: remote.open(server.url)), RemoteError)


def test_a_part_that_brings_other_bytes_than_it_says(server: Server, remote: Remote) -> None:
    """Without a Content-Length only the Content-Range says which bytes they are."""
    for said, size in (("1-65/66", 66), ("0-65/66", 50), ("0-65/66", 80), ("65-0/66", 66)):
        begin = head(206, f"Content-Range: bytes {said}", CHUNKED)
        server.play([*in_chunks(begin, SMALL[:size]), KEEP_ALIVE])
        assert refusal(lambda: remote.open(server.url)).rule == "R1"


# Ranges into memory


@pytest.fixture
def client() -> Iterator[Remote]:
    with Remote("secret", connections=4, retry_policy=patient_policy(backoff_s=0.001)) as made:
        yield made


def opened(client: Remote, url: str) -> RemoteFile:
    start = client.start(url)
    return RemoteFile(client, start, start, Version(len(DATA), '"v1"', None))


def filled(file: RemoteFile, begin: int = 0, end: int = len(DATA)) -> bytes:
    buffer = bytearray(end - begin)
    file.fill(begin, memoryview(buffer))
    return bytes(buffer)


def filled_in_steps(file: RemoteFile, step: int, threads: int = 1) -> bytes:
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(lambda at: filled(file, at, at + step), range(0, len(DATA), step))
        return b"".join(parts)


def right(asked: Asked) -> list[bytes]:
    return part(asked, DATA, ETAG)


def cut(nbytes: int) -> Answer:
    """Answer rightly, and break off after so many bytes of the body."""

    def answer(asked: Asked) -> list[bytes]:
        whole = right(asked)[0]
        return [whole[: whole.index(b"\r\n\r\n") + 4 + nbytes]]

    return answer


def chunked(asked: Asked) -> list[bytes]:
    begin, end = asked.range or (0, 0)
    said = f"Content-Range: bytes {begin}-{end - 1}/{len(DATA)}"
    return [*in_chunks(head(206, said, CHUNKED, ETAG), DATA[begin:end]), KEEP_ALIVE]


def test_a_broken_body_goes_on_where_it_broke(server: Server, client: Remote) -> None:
    script = server.play(one_after_another(cut(100 * KIB), cut(0), cut(300 * KIB), right))
    assert filled(opened(client, server.url)) == DATA
    begins = [asked[0] for asked in script.ranges if asked is not None]
    assert begins == [0, 100 * KIB, 100 * KIB, 400 * KIB]


def test_a_server_that_brings_little_is_not_asked_forever(server: Server, client: Remote) -> None:
    for answer in (cut(100), lambda asked: part(asked, DATA, ETAG, longest=100)):
        script = server.play(answer)
        assert isinstance(refusal(lambda: filled(opened(client, server.url))), RemoteError)
        assert len(script.asked) == ATTEMPTS


def a_206(begin: int, *fields: str, size: int = len(DATA), length: int = 10) -> list[bytes]:
    text = f"Content-Range: bytes {begin}-{begin + length - 1}/{size}"
    return reply(206, text, *fields, body=DATA[:length])


def test_a_wrong_reply(server: Server, client: Remote) -> None:
    for answer, kind in (
        (a_206(1), RemoteError),
        (reply(206, body=DATA[:10]), RemoteError),
        (reply(206, "Content-Encoding: gzip", body=b""), RemoteError),
        (redirect("/model.safetensors"), RemoteError),
        (reply(200, ETAG, body=DATA), CorruptDataError),
        (reply(416, "Content-Range: bytes */5"), CorruptDataError),
        (a_206(0, 'ETag: "v2"'), CorruptDataError),
        (a_206(0, ETAG, size=len(DATA) + 1), CorruptDataError),
    ):
        script = server.play(answer)
        assert type(refusal(lambda: filled(opened(client, server.url), 0, 10))) is kind
        assert len(script.asked) <= 6


def test_a_connection_is_used_again_after_exactly_a_body(server: Server, client: Remote) -> None:
    """Also after an interim reply; not after chunks or other bytes, which may hide a reply."""
    early = head(103, "Transfer-Encoding: chunked")
    answers: list[tuple[Answer, int]] = [
        (lambda asked: [early, *right(asked)], 1),
        (chunked, 3),
        (lambda asked: [right(asked)[0] + a_206(5)[0], KEEP_ALIVE], 3),
    ]
    for answer, expected in answers:
        client.close()
        script = server.play(answer)
        for begin in (5, 5, 300):
            assert filled(opened(client, server.url), begin, begin + 100) == DATA[begin:][:100]
        assert script.connections == expected


def test_a_signed_address_is_used_again(
    server: Server, other_server: Server, client: Remote
) -> None:
    """Files lie on another server, at addresses that are good for 24 requests."""
    origin = server.play(lambda asked: redirect(other_server.at(f"signed?n={asked.number}")))
    uses: Counter[str] = Counter()

    def content(asked: Asked) -> list[bytes]:
        assert "authorization" not in asked.fields
        uses[asked.target] += 1
        return right(asked) if uses[asked.target] <= 24 else reply(403, body=b"has expired")

    other_server.play(content)
    assert filled_in_steps(opened(client, server.url), 16 * KIB) == DATA
    assert len(origin.asked) == 2
    assert len(uses) == 2


def test_cancelling_ends_all(server: Server, client: Remote) -> None:
    waiting = threading.Barrier(3)

    def answer(asked: Asked) -> Iterator[bytes]:
        if asked.target == "/a":
            yield from cut(1000)(asked)
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
        cancellation.set()
        assert {type(one.result(600)) for one in running} == {RemoteError}
    assert "cancelled" in str(refusal(partial(fill, "c")))
