"""Every reply of the corpus, sent as it stands by a server of plain sockets, gets its verdict."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, repeat

import pytest
from support.corpus import Case, case_id, find, load, refusal
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

from blobstore.errors import BlobStoreError, CorruptDataError, HeaderError, RemoteError
from blobstore.formats.safetensors.header import header_of
from blobstore.io.http.remote_files import Remote
from blobstore.io.ranges import UNKNOWN_SIZE

from .conftest import KIB, RETRY_POLICY, tls_server

WHOLE = find("range", "range-ok-206").data
FILE = WHOLE[WHOLE.index(b"\r\n\r\n") + 4 :]
SHORT = [find("range", "range-206-shorter-than-asked").data, KEEP_ALIVE]
HEADER_END = 62

# What follows a reply that the corpus gives only the beginning of.
ENDLESS = {
    "range-200-huge": bytes(65536),
    "range-200-endless-chunked": b"10000\r\n" + bytes(65536) + b"\r\n",
}
SIZE_UNKNOWN = {"range-200-huge", "range-200-endless-chunked", "range-206-total-star"}
ASKED_TWICE = {"range-206-shorter-than-asked": (10, 62), "range-206-body-short": (20, 62)}

# The error of each refused case, its rule, and what it says; all others break rule R1.
OTHER_ERRORS: dict[str, tuple[type[BlobStoreError], str | None, str]] = {
    "range-401": (RemoteError, None, "answers 401"),
    "range-403-html": (RemoteError, None, "answers 403"),
    "range-204": (RemoteError, None, "answers 204"),
    "range-304": (RemoteError, None, "answers 304"),
    "range-429-retry-after-1e9": (RemoteError, None, "answers 429"),
    "range-416": (HeaderError, "F1", "has 0 bytes"),
    "range-header-n-huge": (HeaderError, "F2", "at most 100,000,000"),
    "range-header-n-beyond-total": (HeaderError, "F3", "inside its header"),
    "range-etag-changed": (CorruptDataError, "R1", "changed"),
    "range-total-changed": (CorruptDataError, "R1", "changed"),
    "range-second-reply-200": (CorruptDataError, "R1", "changed"),
    "range-redirect-file": (RemoteError, "R2", "not a web address"),
    "range-redirect-loopback": (RemoteError, "R2", "private network"),
    "range-redirect-metadata-ip": (RemoteError, "R2", "private network"),
    "range-redirect-loop": (RemoteError, "R2", "more than 5 redirects"),
    "range-redirect-bad-location": (RemoteError, "R2", "not a web address"),
    "range-slowloris": (RemoteError, None, "too slow"),
    "range-tls-bad-cert": (RemoteError, None, "certificate"),
}


@pytest.fixture
def client() -> Iterator[Remote]:
    """A client for which the servers of these tests, and nothing else, are out on the internet."""
    with Remote(
        retry_policy=RETRY_POLICY, is_public=lambda address: address == "127.0.0.1"
    ) as made:
        yield made


def check(case: Case, client: Remote, url: str) -> int | None:
    """Read a header as users do: it gets its verdict within 128 KiB. Return the file's size."""
    limits = client.limits(0)
    size = None
    if case.accepted:
        reader = client.open(url, limits)
        assert list(header_of(reader).tensors) == ["a"]
        size = reader.size
    else:
        kind, rule, text = OTHER_ERRORS.get(case.id, (RemoteError, "R1", ""))
        error = refusal(lambda: header_of(client.open(url, limits)))
        assert (type(error), error.rule) == (kind, rule), error
        assert text in str(error)
        assert url in str(error)
    assert limits.taken <= HEADER_END + 128 * KIB
    return size


@pytest.mark.parametrize(
    "case", [case for case in load("range") if not case.by_recipe], ids=case_id
)
def test_replies(case: Case, server: Server, client: Remote) -> None:
    def answer(asked: Asked) -> Iterator[bytes]:
        if case.id == "range-206-shorter-than-asked":
            return iter(SHORT if asked.number == 0 else part(asked, FILE))
        return chain([case.data], repeat(ENDLESS[case.id]) if case.id in ENDLESS else [])

    script = server.play(answer)
    size = check(case, client, server.url)
    assert size in (None, UNKNOWN_SIZE if case.id in SIZE_UNKNOWN else len(FILE))
    tries = RETRY_POLICY.attempts if case.id == "range-http09" else 1  # a head without its end
    again = ASKED_TWICE.get(case.id)
    assert script.ranges == [(0, 65536)] * tries + ([again] if again else [])


# Cases that are several replies


def tagged(first: str, second: str) -> Answer:
    """A part of the file with one ETag, and then the rest with another."""
    begin = (
        head(206, "Content-Range: bytes 0-9/66", "Content-Length: 10", f"ETag: {first}") + FILE[:10]
    )
    return lambda asked: (
        part(asked, FILE, f"ETag: {second}") if asked.number else [begin, KEEP_ALIVE]
    )


TOTAL_67 = head(206, "Content-Range: bytes 10-61/67", "Content-Length: 52") + FILE[10:HEADER_END]
BOMB = gzip.compress(bytes(10**6)).ljust(204_000)  # its head is all that is read of it

# What the server of each case answers, given another server, and how many requests it gets.
CONVERSATIONS: dict[str, tuple[Callable[[Server], Answer], int]] = {
    "range-200-gzip-bomb": (
        lambda _: lambda _: reply(200, "Content-Encoding: gzip", body=BOMB),
        1,
    ),
    "range-500-then-ok": (lambda _: one_after_another(reply(500), reply(500), [WHOLE]), 3),
    "range-etag-changed": (lambda _: tagged('"a"', '"b"'), 2),
    "range-total-changed": (lambda _: one_after_another(SHORT, [TOTAL_67]), 2),
    "range-weak-etag": (lambda _: tagged('W/"a"', 'W/"a"'), 2),
    "range-second-reply-200": (lambda _: one_after_another(SHORT, reply(200, body=FILE[::-1])), 2),
    "range-redirect-cross-host": (
        lambda other: lambda _: redirect(f"http://localhost:{other.port}/x"),
        1,
    ),
    "range-redirect-other-port": (lambda other: lambda _: redirect(other.at("x"), 307), 1),
    "range-redirect-file": (lambda _: lambda _: redirect("file:///etc/passwd"), 1),
    "range-redirect-loopback": (
        lambda other: lambda _: redirect(f"http://[::1]:{other.port}/"),
        1,
    ),
    "range-redirect-metadata-ip": (lambda _: lambda _: redirect("http://169.254.169.254/"), 1),
    "range-redirect-loop": (lambda _: lambda _: redirect("/model.safetensors"), 6),
    "range-headers-1MB": (
        lambda _: lambda _: [head(200, *(f"X-{n}: {'x' * 8000}" for n in range(125)))],
        1,
    ),
    "range-headers-10k-lines": (lambda _: lambda _: [head(200, *["A: b"] * 10_000)], 1),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_recipes(name: str, server: Server, other_server: Server, client: Remote) -> None:
    make, requests = CONVERSATIONS[name]
    script = server.play(make(other_server))
    elsewhere = other_server.play(lambda asked: part(asked, FILE))
    check(find("range", name), client, server.url)
    assert len(script.asked) == requests
    is_redirected = name in ("range-redirect-cross-host", "range-redirect-other-port")
    assert elsewhere.ranges == ([(0, 65536)] if is_redirected else [])


def test_a_slow_drip(server: Server) -> None:
    """A byte, 20 ms of nothing, a byte: three seconds for a reply; the corpus has ten a byte."""
    script = server.play(lambda _: chain.from_iterable((bytes([byte]), WAIT) for byte in WHOLE))
    policy = replace(RETRY_POLICY, deadline_s=0.2, slowest_rate=10**9)
    with Remote(retry_policy=policy) as client:
        check(find("range", "range-slowloris"), client, server.url)
    assert len(script.asked) <= 1  # it is not tried again


def test_a_certificate_that_is_not_trusted(client: Remote) -> None:
    with tls_server() as server:
        script = server.play(lambda asked: part(asked, FILE))
        check(find("range", "range-tls-bad-cert"), client, server.url)
        assert script.asked == []


@pytest.mark.parametrize(
    "host", ["2852039166", "0xa9fea9fe", "169.254.43518", "[::ffff:a9fe:a9fe]"]
)
def test_other_spellings_of_the_metadata_address(host: str, server: Server, client: Remote) -> None:
    """The C library understands them, so addresses are checked after it."""
    script = server.play(lambda _: redirect(f"http://{host}/latest/meta-data/"))
    check(find("range", "range-redirect-metadata-ip"), client, server.url)
    assert len(script.asked) == 1
