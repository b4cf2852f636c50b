"""Strict JSON: what RFC 8259 allows and no more; encoding as Go's encoding/json."""

from __future__ import annotations

import pytest

from blobstore.formats import strictjson
from blobstore.formats.strictjson import Reason, StrictJsonError


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"a":1,"a":1}', Reason.DUPLICATE),
        (b'{"a":1,"\\u0061":2}', Reason.DUPLICATE),
        (b'[{"x":{"b":1,"b":2}}]', Reason.DUPLICATE),
        (b"NaN", Reason.SYNTAX),
        (b"[1,-Infinity]", Reason.SYNTAX),
        (b"{} {}", Reason.SYNTAX),
        (b"", Reason.SYNTAX),
        (b"[1,]", Reason.SYNTAX),
        (b"01", Reason.SYNTAX),
        (b"\xef\xbb\xbf{}", Reason.SYNTAX),
        (b'"\n"', Reason.SYNTAX),
        (b"1" * 5000, Reason.SYNTAX),
        (b'"\xff"', Reason.UTF8),
        (b'"\\ud800"', Reason.UTF8),
        (b'{"\\udc00":1}', Reason.UTF8),
        (b'{"a":["\\ud83d"]}', Reason.UTF8),
        (b"[" * 100_000, Reason.DEPTH),
    ],
)
def test_what_is_refused(raw: bytes, reason: str) -> None:
    with pytest.raises(StrictJsonError) as caught:
        strictjson.parse(raw)
    assert caught.value.reason == reason


def test_what_is_read() -> None:
    value = strictjson.parse('{"é":"\\ud83d\\ude00","n":[0,-1,1.5e3,true,null]}'.encode())
    assert value == {"é": "😀", "n": [0, -1, 1500.0, True, None]}
    assert isinstance(strictjson.parse(b"-0"), float)
    assert isinstance(strictjson.parse(b'[-0.5, 10, "-0"]')[1], int)


def test_depth_counts_the_outermost_level() -> None:
    strictjson.check_depth(strictjson.parse(b"[" * 64 + b"]" * 64))
    with pytest.raises(StrictJsonError):
        strictjson.check_depth(strictjson.parse(b"[" * 65 + b"]" * 65))


def test_encoding_is_that_of_go() -> None:
    assert strictjson.encode({"b": "<é&>\u2028", "a": [1, None, True]}) == (
        '{"b":"\\u003cé\\u0026\\u003e\\u2028","a":[1,null,true]}'.encode()
    )
