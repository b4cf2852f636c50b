"""Files on servers: how many requests, for which bytes.

What happens when a file changes, an address expires, a server is poor.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from support.corpus import refusal
from support.remotes import Remote
from support.servers import (
    KEEP_ALIVE,
    Asked,
    Server,
    head,
    one_after_another,
    part,
    redirect,
    reply,
)

from blobstore.errors import (
    CorruptDataError,
    HeaderError,
    RemoteError,
    ShortReadError,
)
from blobstore.formats.safetensors.header import header_of as read_header
from blobstore.io.ranges import UNKNOWN_SIZE

KIB = 2**10
FIRST = 64 * KIB


def safetensors_file(header: int, data: int = 4) -> bytes:
    """Return a file of one F32 tensor whose header, without its length, has ``header`` bytes."""
    text = (
        json.dumps({"a": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}})
        .encode()
        .ljust(header)
    )
    return (
        struct.pack("<Q", len(text)) + text + bytes(range(251)) * (data // 251) + bytes(data % 251)
    )


SMALL = safetensors_file(1000)
LARGE = safetensors_file(200 * KIB)


def test_a_small_header_takes_one_request_and_a_large_one_two(
    server: Server, remote: Remote
) -> None:
    for header, ranges in (
        (100, [(0, FIRST)]),
        (FIRST - 8, [(0, FIRST)]),
        (FIRST - 7, [(0, FIRST), (FIRST, FIRST + 1)]),
        (300 * KIB, [(0, FIRST), (FIRST, 300 * KIB + 8)]),
    ):
        data = safetensors_file(header)
        script = server.play(partial(part, data=data))
        reader = remote.open(server.url)
        assert list(read_header(reader).tensors) == ["a"]
        assert (reader.size, reader.name) == (len(data), server.url)
        assert script.ranges == ranges


def test_a_read_behind_the_header_asks_for_what_is_missing_and_no_more(
    server: Server, remote: Remote
) -> None:
    data = safetensors_file(100, 300 * KIB)
    script = server.play(lambda asked: part(asked, data))
    reader = remote.open(server.url)
    assert reader.read(FIRST - 10, 30) == data[FIRST - 10 : FIRST + 20]
    assert reader.read(10**5, 1) == data[10**5 : 10**5 + 1]
    assert reader.read(0, FIRST) == data[:FIRST]
    assert script.ranges == [(0, FIRST), (FIRST, FIRST + 20), (10**5, 10**5 + 1)]
    assert script.connections == 1


def test_reads_of_many_threads(server: Server, remote: Remote) -> None:
    data = safetensors_file(100, 300 * KIB)
    server.play(lambda asked: part(asked, data))
    reader = remote.open(server.url)
    with ThreadPoolExecutor(8) as pool:
        offsets = range(0, len(data) - 1000, 10_000)
        assert list(pool.map(lambda offset: reader.read(offset, 1000), offsets)) == [
            data[at : at + 1000] for at in offsets
        ]


@pytest.mark.parametrize(
    "prefix", [b"\xff" * 8, struct.pack("<Q", 100_000_001), struct.pack("<Q", 10**6)]
)
def test_a_header_that_can_not_be_makes_no_second_request(
    prefix: bytes, server: Server, remote: Remote
) -> None:
    script = server.play(lambda asked: part(asked, prefix + bytes(FIRST)))
    assert refusal(lambda: read_header(remote.open(server.url))).rule in ("F2", "F3")
    assert len(script.asked) == 1


def test_an_empty_file(server: Server, remote: Remote) -> None:
    for answer in (lambda asked: part(asked, b""), lambda _: reply(200)):
        server.play(answer)
        reader = remote.open(server.url)
        assert reader.size == 0
        assert refusal(partial(read_header, reader)).rule == "F1"


def test_a_416_of_a_file_that_has_bytes(server: Server, remote: Remote) -> None:
    server.play(lambda _: reply(416, "Content-Range: bytes */66"))
    assert refusal(lambda: remote.open(server.url)).rule == "R1"


# A server that has no ranges


def test_a_size_that_the_server_does_not_say(server: Server, remote: Remote) -> None:
    def answer(asked: Asked) -> list[bytes]:
        whole = part(asked, LARGE)
        return [whole[0].replace(b"/%d\r\n" % len(LARGE), b"/*\r\n"), *whole[1:]]

    server.play(answer)
    reader = remote.open(server.url)
    assert reader.size == UNKNOWN_SIZE
    assert read_header(reader).data_start == len(LARGE) - 4


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("how", ["length", "chunks", "closed"])
def test_a_server_without_ranges_gives_headers(
    data: bytes, how: str, server: Server, remote: Remote
) -> None:
    whole = data + bytes(10**6)
    fields = {
        "length": [f"Content-Length: {len(whole)}"],
        "chunks": ["Transfer-Encoding: chunked"],
        "closed": [],
    }

    def answer(_: Asked) -> Iterator[bytes]:
        yield head(200, *fields[how])
        for begin in range(0, len(whole), 10_000):
            piece = whole[begin : begin + 10_000]
            yield b"%x\r\n%b\r\n" % (len(piece), piece) if how == "chunks" else piece
        yield b"0\r\n\r\n" if how == "chunks" else b""

    server.play(answer)
    reader = remote.open(server.url)
    assert read_header(reader).data_start == len(data) - 4
    assert reader.size == UNKNOWN_SIZE


@pytest.mark.parametrize("how", ["part", "chunks", "closed"])
def test_the_header_of_a_small_file_whose_size_is_not_said(
    how: str, server: Server, remote: Remote
) -> None:
    def answer(asked: Asked) -> list[bytes]:
        if how == "part":
            whole = part(asked, SMALL)
            return [whole[0].replace(b"/%d\r\n" % len(SMALL), b"/*\r\n"), *whole[1:]]
        if how == "closed":
            return [head(200), SMALL]
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMALL), SMALL)
        return [head(200, "Transfer-Encoding: chunked"), chunks]

    server.play(answer)
    reader = remote.open(server.url)
    assert reader.size == UNKNOWN_SIZE
    header = read_header(reader, first_nbytes=FIRST)
    assert header.data_start == len(SMALL) - 4


def test_a_file_of_unknown_size_that_ends_in_its_header(server: Server, remote: Remote) -> None:
    def answer(asked: Asked) -> list[bytes]:
        if asked.range is not None and asked.range[0] >= 100 * KIB:
            return reply(416)
        whole = part(asked, LARGE[: 100 * KIB])
        return [whole[0].replace(b"/%d\r\n" % (100 * KIB), b"/*\r\n"), *whole[1:]]

    server.play(answer)
    error = refusal(lambda: read_header(remote.open(server.url)))
    assert isinstance(error, ShortReadError)
    assert str(error) == f"{server.url} ends before byte {len(LARGE) - 4:,}"


def test_a_whole_file_in_many_small_pieces(server: Server, remote: Remote) -> None:
    """Each piece costs its bytes, and not those before it, too: 2 GB for 4 MB."""
    data = safetensors_file(4_000_000)
    pieces = [data[at : at + 240] for at in range(0, len(data), 240)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    server.play(lambda _: [head(200, "Transfer-Encoding: chunked"), chunks, b"0\r\n\r\n"])
    begun = time.thread_time()
    with remote.open(server.url) as reader:
        assert reader.read(0, 4_000_000) == data[:4_000_000]
    assert time.thread_time() - begun < 2


def test_a_small_file_of_a_server_without_ranges_is_read_to_its_end(
    server: Server, remote: Remote
) -> None:
    server.play(lambda _: reply(200, body=SMALL[:-1]))
    reader = remote.open(server.url)
    assert reader.size == len(SMALL) - 1
    assert refusal(lambda: read_header(reader)).rule == "F17"


def test_a_whole_file_that_breaks_off(server: Server, remote: Remote) -> None:
    server.play(lambda _: [head(200, "Content-Length: 5000") + SMALL[:500]])
    assert isinstance(refusal(lambda: remote.open(server.url)), RemoteError)


# Replies that are cut short


def test_a_broken_connection_is_gone_on_from(server: Server, remote: Remote) -> None:
    def answer(asked: Asked) -> list[bytes]:
        whole = part(asked, LARGE)
        return whole if asked.number % 2 else [whole[0][: len(whole[0]) // 2]]

    script = server.play(answer)
    assert read_header(remote.open(server.url)).data_start == len(LARGE) - 4
    begins = [asked[0] for asked in script.ranges if asked]
    assert begins == sorted(set(begins))
    assert len(begins) <= 4


def test_replies_of_one_byte_end_after_a_few(server: Server, remote: Remote) -> None:
    script = server.play(
        lambda asked: part(asked, LARGE, longest=FIRST if asked.number == 0 else 1)
    )
    error = refusal(lambda: read_header(remote.open(server.url)))
    assert (error.rule, "5 replies" in str(error)) == ("R1", True)
    assert len(script.asked) == 6


def test_connections_that_always_break_end_after_a_few(server: Server, remote: Remote) -> None:
    script = server.play(
        lambda asked: [part(asked, LARGE)[0].partition(b"\r\n\r\n")[0] + b"\r\n\r\n"]
    )
    assert isinstance(refusal(lambda: read_header(remote.open(server.url))), RemoteError)
    assert (
        len(script.asked) == 6
    )  # what opening asks for, and five attempts at the first eight bytes


@pytest.mark.parametrize("size", [50, 80], ids=["fewer", "more"])
def test_a_part_of_another_length_than_it_says(size: int, server: Server, remote: Remote) -> None:
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (size, SMALL[:size])
    server.play(
        lambda _: [
            head(206, "Content-Range: bytes 0-65/66", "Transfer-Encoding: chunked") + chunk,
            KEEP_ALIVE,
        ]
    )
    error = refusal(lambda: remote.open(server.url))
    assert (error.rule, "another number of bytes" in str(error)) == ("R1", True)


@pytest.mark.parametrize("more", [b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
def test_what_comes_behind_a_reply_is_not_the_next_one(more: bytes, server: Server) -> None:
    script = server.play(lambda asked: [part(asked, SMALL)[0] + more, KEEP_ALIVE])
    with Remote() as remote:
        assert [remote.open(server.url).size for _ in range(2)] == [len(SMALL)] * 2
    assert script.connections == 2


# Files that change


def test_if_range_is_asked_with_a_strong_validator_only(server: Server, remote: Remote) -> None:
    for line, condition in (
        ('ETag: "v1"', '"v1"'),
        ('ETag: W/"v1"', None),
        ("ETag: v1", None),
        ('ETag: "\xff"', None),
        ("Last-Modified: Sat, 21 Nov 2026 10:00:00 GMT", None),
    ):

        def answer(asked: Asked, line: str = line) -> list[bytes]:
            return part(asked, LARGE, line)

        script = server.play(answer)
        read_header(remote.open(server.url))
        assert [asked.fields.get("if-range") for asked in script.asked] == [None, condition]


def test_a_file_that_is_replaced_while_it_is_opened(server: Server, remote: Remote) -> None:
    """To If-Range the server sends the new one."""
    server.play(
        lambda asked: (
            reply(200, 'ETag: "v2"', body=LARGE)
            if "if-range" in asked.fields
            else part(asked, LARGE, 'ETag: "v1"')
        )
    )
    error = refusal(lambda: read_header(remote.open(server.url)))
    assert isinstance(error, CorruptDataError)
    assert "changed while it was read" in str(error)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('ETag: "a"', 'ETag: "b"'),
        ('ETag: W/"a"', 'ETag: W/"b"'),
        (
            "Last-Modified: Sat, 21 Nov 2026 10:00:00 GMT",
            "Last-Modified: Sat, 21 Nov 2026 10:00:01 GMT",
        ),
    ],
)
def test_a_part_of_another_version_is_refused(
    before: str, after: str, server: Server, remote: Remote
) -> None:
    server.play(lambda asked: part(asked, LARGE, after if asked.number else before))
    assert isinstance(refusal(lambda: read_header(remote.open(server.url))), CorruptDataError)


def test_a_file_that_changes_after_it_was_opened_is_an_error(
    server: Server, remote: Remote
) -> None:
    data = safetensors_file(100, 300 * KIB)
    for changed in (lambda _: reply(200, body=data[:-1]), lambda asked: part(asked, data[:1000])):
        server.play(one_after_another(lambda asked: part(asked, data), changed))
        reader = remote.open(server.url)
        error = refusal(partial(reader.read, FIRST, 10))
        assert isinstance(error, CorruptDataError)
        assert "changed while it was read" in str(error)


# Redirects to addresses that end


def test_the_address_that_was_redirected_to_is_remembered(
    server: Server, other_server: Server, remote: Remote
) -> None:
    first = server.play(lambda _: redirect(other_server.at("signed?key=1")))
    second = other_server.play(lambda asked: part(asked, LARGE))
    reader = remote.open(server.url)
    read_header(reader)
    assert reader.name == server.url
    assert (len(first.asked), len(second.asked)) == (1, 2)


@pytest.mark.parametrize("status", [403, 404, 410])
def test_an_expired_address_is_asked_for_again(
    status: int, server: Server, other_server: Server, remote: Remote
) -> None:
    def signed(asked: Asked) -> list[bytes]:
        expired = asked.target.endswith("key=0") and asked.number > 1
        return reply(status) if expired else part(asked, data)

    data = safetensors_file(100, 300 * KIB)
    first = server.play(lambda asked: redirect(other_server.at(f"signed?key={asked.number}")))
    second = other_server.play(signed)
    reader = remote.open(server.url)
    assert [reader.read(at, 10) for at in (10**5, 2 * 10**5, 10**5 + 1)] == [
        data[at : at + 10] for at in (10**5, 2 * 10**5, 10**5 + 1)
    ]
    assert len(first.asked) == 2
    assert [asked.target[-1] for asked in second.asked] == ["0", "0", "0", "1", "1"]


def test_an_address_that_stays_expired_is_an_error(
    server: Server, other_server: Server, remote: Remote
) -> None:
    server.play(lambda _: redirect(other_server.at("signed")))
    data = safetensors_file(100, 300 * KIB)
    other_server.play(one_after_another(lambda asked: part(asked, data), reply(403)))
    reader = remote.open(server.url)
    error = refusal(lambda: reader.read(10**5, 10))
    assert isinstance(error, RemoteError)
    assert error.status == 403


@pytest.mark.parametrize(
    "line",
    [
        "Content-Range: bytes 0-65/66\r\nContent-Range: bytes 0-65/66",
        "Content-Range: bytes=0-65/66",
        "Content-Range: bytes 0-65/66, bytes 0-65/66",
        "Content-Range: bytes  0-65/66",
        "Content-Range: bytes 65-0/66",
        "Content-Range: bytes -0-65/66",
        "Content-Range: bytes +0-65/66",
        "Content-Range: bytes 0-65/0x42",
        "Content-Range: bytes */66",
        "Content-Range: bytes 0-65/66\r\nContent-Type: multipart/byteranges; boundary=x",
        "Content-Range: bytes 0-64/66",
        "Content-Range: bytes 0-65/9300000000000000000",
        "Content-Range: bytes 0-65/66\r\nContent-Encoding: gzip, identity",
    ],
)
def test_ranges_that_are_none(line: str, server: Server, remote: Remote) -> None:
    server.play(lambda _: [head(206, "Content-Length: 66", line) + SMALL[:66], KEEP_ALIVE])
    assert refusal(lambda: remote.open(server.url)).rule == "R1"


def test_a_part_that_begins_elsewhere_is_refused_though_it_has_as_many_bytes(
    server: Server, remote: Remote
) -> None:
    """Without a Content-Length only the Content-Range says which bytes they are."""
    lines = ("Content-Range: bytes 1-65/66", "Transfer-Encoding: chunked")
    server.play(lambda _: [head(206, *lines) + b"42\r\n%b\r\n0\r\n\r\n" % SMALL[:66], KEEP_ALIVE])
    error = refusal(lambda: remote.open(server.url))
    assert error.rule == "R1"
    assert "with the Content-Range 'bytes 1-65/66'" in str(error)


@pytest.mark.parametrize("length", [50, 100])
def test_a_part_of_another_content_length_than_its_range_is_refused(
    length: int, server: Server, remote: Remote
) -> None:
    """Of the longer one the bytes fit: the connection ends behind them, as if it had broken."""
    server.play(
        lambda _: [
            head(206, "Content-Range: bytes 0-65/66", f"Content-Length: {length}")
            + SMALL[: min(length, 66)]
        ]
    )
    error = refusal(lambda: remote.open(server.url))
    assert error.rule == "R1"
    assert f"a Content-Length of {length} and the Content-Range" in str(error)


def test_a_read_beyond_the_end_is_refused_without_a_request(server: Server, remote: Remote) -> None:
    script = server.play(lambda asked: part(asked, LARGE))
    reader = remote.open(server.url)
    asked = len(script.asked)
    error = refusal(lambda: reader.read(len(LARGE) - 1, 2))
    assert isinstance(error, ShortReadError)
    assert f"it had {len(LARGE):,}" in str(error)
    assert len(script.asked) == asked


def test_a_header_of_another_file_is_its_own_error(server: Server, remote: Remote) -> None:
    server.play(lambda asked: part(asked, b"version https://git-lfs.github.com/spec/v1\n"))
    error = refusal(lambda: read_header(remote.open(server.url)))
    assert isinstance(error, HeaderError)
    assert "git-lfs pointer" in str(error)
    assert server.url in str(error)
