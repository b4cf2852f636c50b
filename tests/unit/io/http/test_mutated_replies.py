"""Any server's reply gives a header or one of our errors, with bounded requests and bytes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from support.corpus import load
from support.servers import Server, server as run_server

from blobstore.errors import BlobStoreError
from blobstore.formats.safetensors.header import header_of
from blobstore.io.http.remote_files import Remote

from .conftest import RETRY_POLICY

REPLIES = [case.data for case in load("range") if not case.by_recipe]
PIECES = [
    *(b"\r\n", b"\n", b": ", b"0", b"9" * 20, b"-", b"/", b"*", b"\x00", b"\xff"),
    *(b"8\r\n", b"-5\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
]
LINES = [
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 66\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Connection: upgrade\r\n",
    b"Content-Range: bytes 0-65/66\r\n",
    b"Location: /x\r\n",
    b'ETag: "\xe4"\r\n',
    b"Retry-After: 0\r\n",
]
STATUSES = [b"101", b"103", b"200", b"204", b"206", b"302", b"304", b"416", b"503", b"999", b"000"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with run_server() as running:
        yield running


@pytest.fixture(scope="module")
def client() -> Iterator[Remote]:
    """A client that gives up soon: that is an error of ours, too."""
    policy = replace(RETRY_POLICY, attempts=2, silence_s=0.2, deadline_s=1, slowest_rate=10**7)
    with Remote(retry_policy=policy) as made:
        yield made


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A reply of the corpus with a few changes: status, lines, inserted or removed pieces."""
    data = draw(st.sampled_from(REPLIES))
    if draw(st.booleans()):
        data = data[:9] + draw(st.sampled_from(STATUSES)) + data[12:]
    begin, newline, rest = data.partition(b"\r\n")
    data = begin + newline + b"".join(draw(st.lists(st.sampled_from(LINES), max_size=2))) + rest
    for _ in range(draw(st.integers(0, 3))):
        at, end = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
        middle = draw(st.sampled_from([b"", data[at:end] * 2, *PIECES]))
        data = data[:at] + middle + data[min(end, at + 8) :]
    return data


@given(st.lists(mutated(), min_size=1, max_size=3))
def test_replies(server: Server, client: Remote, replies: list[bytes]) -> None:
    script = server.play(lambda asked: [replies[min(asked.number, len(replies) - 1)]])
    limits = client.limits(0)
    try:
        header = header_of(client.open(server.url, limits))
    except BlobStoreError:
        header = None
    assert header is None or list(header.tensors) == ["a"]
    assert limits.taken <= 62 + 128 * 2**10
    assert len(script.asked) <= 64
