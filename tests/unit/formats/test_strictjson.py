"""Strict JSON: what RFC 8259 allows and no more; encoding as Go's encoding/json."""

from __future__ import annotations

import pytest

from blobstore.errors import LimitExceededError
from blobstore.formats import strictjson
from blobstore.formats.strictjson import StrictJsonError


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"a":1,"a":1}', "duplicate"),
        (b'{"a":1,"\\u0061":2}', "duplicate"),
        (b'[{"x":{"b":1,"b":2}}]', "duplicate"),
        (b"NaN", "syntax"),
        (b"[1,-Infinity]", "syntax"),
        (b"{} {}", "syntax"),
        (b"", "syntax"),
        (b"[1,]", "syntax"),
        (b"01", "syntax"),
        (b"\xef\xbb\xbf{}", "syntax"),
        (b'"\n"', "syntax"),
        (b"1" * 5000, "syntax"),
        (b'"\xff"', "utf8"),
        (b'"\\ud800"', "utf8"),
        (b'{"\\udc00":1}', "utf8"),
        (b'{"a":["\\ud83d"]}', "utf8"),
        (b"[" * 100_000, "depth"),
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


def test_values_are_counted_before_they_are_made() -> None:
    for raw in (b"[" + b"[]," * 10 + b"0]", b'{"a":[1,2,3,4,5,6,7,8,9]}'):
        with pytest.raises(StrictJsonError) as caught:
            strictjson.parse(raw, values=9)
        assert caught.value.reason == "values"


def test_commas_and_brackets_in_texts_are_not_values() -> None:
    text = r"[{,\\" * 100
    assert strictjson.parse(strictjson.encode([text, '"' + text]), values=3) == [text, '"' + text]


def test_too_many_values_in_a_document() -> None:
    raw = b'{"a":[' + b"[]," * 1_000_000 + b"0]}"
    with pytest.raises(LimitExceededError, match="more than 1,000,000 values"):
        strictjson.parse_object(raw, "the manifest", rule="M1", limit=len(raw))


def test_depth_counts_the_outermost_level() -> None:
    strictjson.check_depth(strictjson.parse(b"[" * 64 + b"]" * 64))
    with pytest.raises(StrictJsonError):
        strictjson.check_depth(strictjson.parse(b"[" * 65 + b"]" * 65))


def test_encoding_is_that_of_go() -> None:
    assert strictjson.encode({"b": "<é&>\u2028", "a": [1, None, True]}) == (
        '{"b":"\\u003cé\\u0026\\u003e\\u2028","a":[1,null,true]}'.encode()
    )
