"""Filling memory with ranges: what goes on, what is renewed, what ends it; many threads at once."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
from support.clock import Clock
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
from blobstore.io.http import connections, direct
from blobstore.io.http.client import HttpClient
from blobstore.io.http.connections import CheckedBackend
from blobstore.io.http.filling import FetchControl, RangeFiller, slots_for
from blobstore.io.http.redirects import Linked
from blobstore.io.http.replies import Version
from blobstore.io.http.siblings import Siblings
from blobstore.names import Digest

KIB = 2**10
DATA = random.Random(1).randbytes(640 * KIB)
ETAG = 'ETag: "v1"'
POLICY = patient_policy(attempts=4, backoff_s=0.001, longest_wait_s=2)
Seen = list[tuple[Version, Linked | None]]


@pytest.fixture
def seen() -> Seen:
    return []


def unhurried(control: FetchControl) -> FetchControl:
    """Let its clocks stand still: no connection is slow, and no level is tried again."""
    control.siblings = Siblings(Clock())
    control.slots._clock = Clock()
    return control


@pytest.fixture
def control(remote: Remote) -> Iterator[FetchControl]:
    made = unhurried(FetchControl(remote, 4, policy=POLICY))
    yield made
    made.cancel()


def filler(
    control: FetchControl, url: str, seen: Seen | None = None, version: Version | None = None
) -> RangeFiller:
    found: Seen = seen if seen is not None else []
    return RangeFiller(control, url, version, lambda *reply: found.append(reply))


def filled(one: RangeFiller, begin: int = 0, end: int = len(DATA)) -> bytes:
    buffer = bytearray(end - begin)
    one.fill(begin, memoryview(buffer))
    return bytes(buffer)


def right(asked: Asked) -> list[bytes]:
    return part(asked, DATA, ETAG)


def cut(nbytes: int) -> Answer:
    """Answer rightly, and break off after so many bytes of the body."""

    def answer(asked: Asked) -> Iterator[bytes]:
        whole = part(asked, DATA, ETAG)[0]
        yield whole[: whole.index(b"\r\n\r\n") + 4 + nbytes]

    return answer


def test_ranges_come_over_kept_connections_with_their_version(
    server: Server, control: FetchControl, seen: Seen
) -> None:
    script, one = server.play(right), filler(control, server.url, seen)
    step = 64 * KIB
    assert b"".join(filled(one, at, at + step) for at in range(0, len(DATA), step)) == DATA
    assert script.connections == 1
    assert script.ranges == [(at, at + step) for at in range(0, len(DATA), step)]
    conditions = [asked.fields.get("if-match") for asked in script.asked]
    assert conditions == [None, *['"v1"'] * 9]
    assert seen == [(Version(len(DATA), '"v1"', None), None)]


@pytest.mark.parametrize(
    ("version", "field", "value"),
    [
        (Version(len(DATA), '"v1"', None), "if-match", '"v1"'),
        (Version(len(DATA), None, "Mon, 23 Nov 2026 06:00:00 GMT"), "if-unmodified-since", None),
        (Version(len(DATA), 'W/"v1"', None), "if-match", None),
    ],
)
def test_a_known_version_is_asked_for_from_the_first_request_on(
    server: Server, control: FetchControl, version: Version, field: str, value: str | None
) -> None:
    fields = [f"ETag: {version.etag}"] if version.etag else []
    fields += [f"Last-Modified: {version.modified}"] if version.modified else []
    script = server.play(lambda asked: part(asked, DATA, *fields))
    assert filled(filler(control, server.url, version=version)) == DATA
    assert script.asked[0].fields.get(field) == (value or version.modified)


@pytest.mark.parametrize(
    ("connections", "rate", "most"),
    [(None, None, 16), (3, None, 3), (None, 2**20, 1), (None, 5 * 2**20, 5), (32, 2**20, 32)],
)
def test_slow_rates_need_few_connections(
    connections: int | None, rate: int | None, most: int
) -> None:
    slots = slots_for(connections, rate)
    assert slots.most == most
    assert slots.level == min(most, 4 if connections is None else most)


def test_many_threads_fill_many_ranges(server: Server, control: FetchControl) -> None:
    script, one = server.play(right), filler(control, server.url)
    step = 16 * KIB
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(lambda at: filled(one, at, at + step), range(0, len(DATA), step))
        assert b"".join(parts) == DATA
    assert script.connections <= 4


def test_a_broken_body_goes_on_where_it_broke(server: Server, control: FetchControl) -> None:
    script = server.play(one_after_another(cut(100 * KIB), cut(0), cut(300 * KIB), right))
    assert filled(filler(control, server.url)) == DATA
    begins = [asked[0] for asked in script.ranges if asked is not None]
    assert begins == [0, 100 * KIB, 100 * KIB, 400 * KIB]


def test_a_server_that_brings_little_is_not_asked_for_ever(
    server: Server, control: FetchControl
) -> None:
    script = server.play(cut(100))
    error = refusal(lambda: filled(filler(control, server.url)))
    assert isinstance(error, RemoteError)
    assert len(script.asked) == POLICY.attempts


def test_a_shorter_part_is_continued(server: Server, control: FetchControl) -> None:
    server.play(lambda asked: part(asked, DATA, ETAG, longest=200 * KIB))
    assert filled(filler(control, server.url)) == DATA


def test_a_chunked_body_is_read_too(server: Server, control: FetchControl) -> None:
    def answer(asked: Asked) -> Iterator[bytes]:
        begin, end = asked.range or (0, 0)
        yield head(
            206, f"Content-Range: bytes {begin}-{end - 1}/{len(DATA)}", "Transfer-Encoding: chunked"
        )
        for at in range(begin, end, 10_000):
            piece = DATA[at : min(end, at + 10_000)]
            yield b"%x\r\n%b\r\n" % (len(piece), piece)
        yield b"0\r\n\r\n"

    server.play(answer)
    assert filled(filler(control, server.url), 5, 100_005) == DATA[5:100_005]


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
        (reply(200, ETAG, body=DATA), RemoteError, "whole file"),
        (reply(412), CorruptDataError, "changed"),
        (reply(416, "Content-Range: bytes */5"), CorruptDataError, "changed"),
        (a_206(0, 'ETag: "v2"'), CorruptDataError, "changed"),
        (a_206(0, ETAG, size=len(DATA) + 1), CorruptDataError, "changed"),
        (reply(404), NotFoundError, "404"),
        (reply(403), RemoteError, "403"),
        (reply(206, "Content-Encoding: gzip", body=b""), RemoteError, "coding"),
        (redirect("/model.safetensors"), RemoteError, "redirects"),
        ([head(206, "Content-Range: bytes 0-9/655360", "Content-Length: 10") + b"x"] * 1,
         RemoteError, ""),
    ],
)  # fmt: skip
def test_wrong_replies_are_typed_errors(
    server: Server, control: FetchControl, answer: list[bytes], kind: type, says: str
) -> None:
    """The first reply is right, so the version is known."""
    script = server.play(one_after_another(right, answer))
    one = filler(control, server.url)
    assert filled(one, 0, 10) == DATA[:10]
    error = refusal(lambda: filled(one, 0, 10))
    assert (type(error), says in str(error)) == (kind, True), error
    assert len(script.asked) <= 8


def test_a_server_that_mistakes_conditions_is_asked_without(
    server: Server, control: FetchControl
) -> None:
    script = server.play(lambda asked: reply(412) if "if-match" in asked.fields else right(asked))
    one = filler(control, server.url)
    for begin in (0, 1000, 2000):
        assert filled(one, begin, begin + 1000) == DATA[begin : begin + 1000]
    assert len(script.asked) == 4
    server.play(lambda asked: part(asked, DATA))
    assert isinstance(refusal(lambda: filled(one)), CorruptDataError)


def test_a_server_that_mistakes_conditions_is_asked_without_by_all(
    server: Server, control: FetchControl
) -> None:
    both = threading.Barrier(2)

    def answer(asked: Asked) -> Iterable[bytes]:
        if "if-match" not in asked.fields:
            return right(asked)
        both.wait(600)
        return reply(412)

    server.play(answer)
    one = filler(control, server.url)
    assert filled(one, 0, 1000) == DATA[:1000]
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda at: filled(one, at, at + 1000), (1000, 2000)))
    assert b"".join(parts) == DATA[1000:3000]


def test_requests_that_wait_for_the_route_know_what_it_found(
    server: Server, control: FetchControl
) -> None:
    come, begin = threading.Event(), threading.Barrier(2)

    def answer(asked: Asked) -> Iterable[bytes]:
        if not come.is_set():
            come.wait(0.2)
        return right(asked)

    script, one = server.play(answer), filler(control, server.url)

    def fill(at: int) -> bytes:
        begin.wait(600)
        return filled(one, at, at + 1000)

    with ThreadPoolExecutor(2) as pool:
        assert b"".join(pool.map(fill, (0, 1000))) == DATA[:2000]
    assert [asked.fields.get("if-match") for asked in script.asked] == [None, '"v1"']


@pytest.mark.parametrize("nbytes", [1000, 200 * KIB])  # with the head, or behind it
def test_bytes_behind_a_reply_are_not_the_next_one(
    server: Server, control: FetchControl, nbytes: int
) -> None:
    def answer(asked: Asked) -> Iterator[bytes]:
        first, *_ = part(asked, DATA, ETAG)
        wrong = part(replace(asked, fields={"range": f"bytes=0-{nbytes - 1}"}), DATA, ETAG)[0]
        yield first + wrong

    server.play(answer)
    one = filler(control, server.url)
    for begin in (0, nbytes, 2 * nbytes):
        assert filled(one, begin, begin + nbytes) == DATA[begin : begin + nbytes]


def test_a_server_that_closes_kept_connections(server: Server, control: FetchControl) -> None:
    """It does not say so before, so each connection is found closed when it is used."""

    def answer(asked: Asked) -> Iterator[bytes]:
        yield part(asked, DATA, ETAG)[0]
        raise OSError("closed")

    script, one = server.play(answer), filler(control, server.url)
    step = 64 * KIB
    assert b"".join(filled(one, at, at + step) for at in range(0, len(DATA), step)) == DATA
    assert script.connections == len(script.asked)


def test_idle_connections_that_brought_weights_are_not_checked_for_each_request(
    server: Server, control: FetchControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[int] = []
    real = CheckedBackend.connect_tcp

    def connect(*args: Any, **kwargs: Any) -> Any:
        connection = real(*args, **kwargs)
        stream = connection._stream
        connection._stream = mock.Mock(wraps=stream)

        def info(name: str) -> Any:
            checks.extend([1] * (name == "is_readable"))
            return stream.get_extra_info(name)

        connection._stream.get_extra_info = info
        return connection

    monkeypatch.setattr(connections, "_UNCHECKED_S", 1e9)
    monkeypatch.setattr(CheckedBackend, "connect_tcp", connect)
    script, one, step = server.play(right), filler(control, server.url), 16 * KIB
    gate = threading.Barrier(4)

    def fill(begin: int) -> bytes:
        gate.wait(300)  # so there are four connections
        return filled(one, begin, begin + step)

    with ThreadPoolExecutor(4) as pool:
        assert b"".join(pool.map(fill, range(0, len(DATA), step))) == DATA
    used_again = len(script.asked) - script.connections
    assert len(checks) == used_again


def test_a_file_that_is_refused_is_not_read(server: Server, control: FetchControl) -> None:
    def refuse(version: Version, linked: Linked | None) -> None:
        raise CorruptDataError("another one")

    server.play(right)
    one = RangeFiller(control, server.url, None, refuse)
    assert isinstance(refusal(lambda: filled(one)), CorruptDataError)


class SignedAddresses:
    """A server whose files lie on another one, at addresses that are good for a few requests."""

    def __init__(self, lasts: int) -> None:
        self.lasts = lasts
        self.given = 0
        self.uses: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.renewed = threading.Event()

    def origin(self, other: Server) -> Answer:
        def answer(asked: Asked) -> list[bytes]:
            with self.lock:
                self.given += 1
                where = other.at(f"signed?n={self.given}")
            digest = "X-Linked-ETag: " + f'"{Digest.of(DATA).hex}"'
            return reply(302, f"Location: {where}", digest, "X-Repo-Commit: " + "c" * 40)

        return answer

    def content(self, asked: Asked) -> list[bytes]:
        with self.lock:
            self.uses[asked.target] += 1
            uses = self.uses[asked.target]
        if asked.target.endswith("=2") and uses == 2:  # others use what the first one found
            self.renewed.set()
        if uses <= self.lasts:
            return right(asked)
        if uses == self.lasts + 1 and self.lasts:  # one reply comes after the renewal
            self.renewed.wait(600)
        return reply(403, body=b"Request has expired")


def test_a_signed_address_is_asked_for_once_and_renewed_once(
    server: Server, other_server: Server, control: FetchControl, seen: Seen
) -> None:
    signed = SignedAddresses(lasts=24)
    start, content = server.play(signed.origin(other_server)), other_server.play(signed.content)
    one, step = filler(control, server.url, seen), 16 * KIB
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(lambda at: filled(one, at, at + step), range(0, len(DATA), step))
        assert b"".join(parts) == DATA
    assert (len(start.asked), signed.given) == (2, 2)
    assert {linked for _, linked in seen} == {Linked(Digest.of(DATA), "c" * 40)}
    assert {asked.fields.get("authorization") for asked in content.asked} == {None}


def test_a_signed_address_that_is_never_good_is_an_error(
    server: Server, other_server: Server, control: FetchControl
) -> None:
    signed = SignedAddresses(lasts=0)
    server.play(signed.origin(other_server))
    other_server.play(signed.content)
    error = refusal(lambda: filled(filler(control, server.url)))
    assert (type(error), isinstance(error, RemoteError) and error.status) == (RemoteError, 403)
    assert signed.given <= 4
    assert "?" not in str(error)


def test_the_token_is_for_its_origin_only(server: Server, other_server: Server) -> None:
    signed = SignedAddresses(lasts=99)
    start, content = server.play(signed.origin(other_server)), other_server.play(signed.content)
    with HttpClient("secret") as client:
        client.start(server.url)
        control = unhurried(FetchControl(client, 2, policy=POLICY))
        assert filled(filler(control, server.url), 0, 10) == DATA[:10]
        assert filled(filler(control, other_server.url), 0, 10) == DATA[:10]
    assert [asked.fields.get("authorization") for asked in start.asked] == ["Bearer secret"]
    assert {asked.fields.get("authorization") for asked in content.asked} == {None}


@pytest.mark.parametrize("fields", [(), ("Retry-After: 0",)])
def test_a_busy_server_is_asked_less(
    server: Server, remote: Remote, fields: tuple[str, ...]
) -> None:
    """Its 429s fall on all threads; they wait together, and the data are right."""
    lock, busy = threading.Lock(), [3]

    def answer(asked: Asked) -> Iterable[bytes]:
        with lock:
            busy[0] -= 1
            return reply(429, *fields) if busy[0] >= 0 else right(asked)

    script = server.play(answer)
    control = unhurried(FetchControl(remote, policy=POLICY))
    one, step = filler(control, server.url), 64 * KIB
    before = control.slots.level
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(lambda at: filled(one, at, at + step), range(0, len(DATA), step))
        assert b"".join(parts) == DATA
    assert control.slots.level < before
    assert len(script.asked) == 13


def test_a_wait_that_is_too_long_is_an_error_with_a_hint(
    server: Server, control: FetchControl
) -> None:
    script = server.play(lambda _: reply(429, 'RateLimit: "resolvers";r=0;t=600'))
    one = filler(control, server.url)
    for _ in range(2):
        error = refusal(lambda: filled(one))
        assert "asks to wait for 6" in str(error)
        assert error.hint
    assert len(script.asked) == 1


@pytest.mark.parametrize("is_begun", [False, True])
def test_cancelling_ends_all(server: Server, control: FetchControl, *, is_begun: bool) -> None:
    waiting = threading.Barrier(3)

    def answer(asked: Asked) -> Iterator[bytes]:
        if is_begun:
            yield next(iter(cut(1000)(asked)))
        waiting.wait(600)
        while True:
            yield WAIT

    server.play(answer)
    urls = [server.at("a"), server.at("b")]
    with ThreadPoolExecutor(2) as pool:
        fillers = [filler(control, url) for url in urls]
        running = [pool.submit(refusal, partial(filled, one)) for one in fillers]
        waiting.wait(600)
        control.cancel()
        assert {type(one.result(600)) for one in running} == {RemoteError}
    assert isinstance(refusal(lambda: filled(filler(control, server.url))), RemoteError)


FAULTS: list[Answer] = [
    right,
    right,
    right,
    right,
    cut(0),
    cut(70 * KIB),
    cut(100 * KIB),
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


@pytest.mark.parametrize("seed", range(24))
def test_faults_in_any_order_give_the_bytes_or_a_typed_error(
    server: Server, remote: Remote, seed: int
) -> None:
    choose, lock = random.Random(seed), threading.Lock()
    has_fatal = seed % 4 == 0

    def answer(asked: Asked) -> Iterable[bytes]:
        with lock:
            is_fatal = has_fatal and choose.random() < 0.1
            return choose.choice(FATAL if is_fatal else FAULTS)(asked)

    server.play(answer)
    control = FetchControl(remote, policy=replace(POLICY, attempts=30))
    one, step = filler(control, server.url), 160 * KIB
    outcomes: list[bytes | BlobStoreError] = []

    def fetch(begin: int) -> None:
        try:
            outcomes.append(filled(one, begin, begin + step))
        except (RemoteError, CorruptDataError, NotFoundError) as error:
            outcomes.append(error)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fetch, range(0, len(DATA), step)))
    expected = {DATA[begin : begin + step] for begin in range(0, len(DATA), step)}
    came = {one for one in outcomes if isinstance(one, bytes)}
    assert came <= expected
    assert len(outcomes) == 4
    errors = [str(one) for one in outcomes if not isinstance(one, bytes)]
    assert has_fatal or not errors


def test_a_slow_connection_is_dropped(
    server: Server, control: FetchControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings a byte every 20 ms, several in a tick. Two others are done when the clock moves."""
    monkeypatch.setattr(direct, "_TICK_S", 0.1)
    clock, has_begun = Clock(), threading.Event()
    control.siblings = Siblings(clock)

    def answer(asked: Asked) -> Iterator[bytes]:
        whole = right(asked)[0]
        body = whole.index(b"\r\n\r\n") + 4
        yield whole[:body]
        if asked.target == "/slow" and asked.range == (0, len(DATA)):
            for byte in whole[body:]:  # until the client leaves
                yield bytes([byte])
                yield WAIT
        yield whole[body:]
        yield KEEP_ALIVE

    script = server.play(answer)
    slow, quick = filler(control, server.at("slow")), filler(control, server.at("quick"))
    buffer = bytearray(len(DATA))

    def begun(nbytes: int) -> None:
        if nbytes:
            has_begun.set()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(slow.fill, 0, memoryview(buffer), begun)
        try:
            assert has_begun.wait(600)
            assert [filled(quick) == DATA for _ in range(2)] == [True, True]
            clock.now = 2.0
            running.result(600)
        finally:
            control.cancel()
    assert buffer == DATA
    first, anew = (asked for asked in script.asked if asked.target == "/slow")
    assert anew.range is not None
    assert 0 < anew.range[0] < anew.range[1] == len(DATA)  # the rest
    assert anew.connection != first.connection
