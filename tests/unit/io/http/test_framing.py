"""Framing: the result does not depend on how bytes arrive, and reading ends."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from blobstore.io.http.connections import Framing

PIECES = [
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 103 x\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 5\r\n",
    b"\r\n",
    b"\n",
]
PIECES += [
    b"5\r\nabcde\r\n",
    b"0\r\n\r\n",
    b"-5\r\n",
    b"5;x\r\n",
    b"ffffffffffffffff\r\n",
    b"x",
    b"abcde",
    b"\r",
    b"5",
]


def verdict(parts: list[bytes]) -> tuple[bool, bool, bool]:
    """Return whether all was accepted, whether bytes followed, and whether the head goes on."""
    framing = Framing()
    accepted = [framing.feed(part) for part in parts]
    return (all(accepted), framing.overrun, framing.in_head)


@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join),
    st.lists(st.integers(0, 80), max_size=4),
)
def test_the_parts_do_not_matter(data: bytes, cuts: list[int]) -> None:
    accepted, overrun, in_head = verdict([data])
    at = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[begin:end] for begin, end in pairwise(at)]
    assert verdict(parts)[0] == accepted
    if accepted:
        assert verdict(parts) == (accepted, overrun, in_head)


@pytest.mark.parametrize(
    ("data", "accepted", "overrun"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", True, False),
        (b"HTTP/1.1 200 OK\r\ncontent-length:3\r\n\r\nabcd", True, True),
        (
            (
                b"HTTP/1.1 103 x\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: "
                b"3\r\n\r\nabc"
            ),
            True,
            False,
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7fffffffffffffff\r\n", True, False),
        (
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: "
                b"chunked\r\n\r\n3\r\nabc\r\n8000000000000000\r\n"
            ),
            False,
            False,
        ),
        (b"HTTP/1.1 200 OK\r\n\r\n8000000000000000\r\n", True, False),
    ],
)
def test_replies(data: bytes, accepted: bool, overrun: bool) -> None:
    assert verdict([data])[:2] == (accepted, overrun)
