"""Strict JSON: what RFC 8259 allows and no more; encoding as Go's encoding/json; checked documents.

Each check accepts and refuses what pydantic's strict mode does, in its words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from blobstore.errors import DocumentError, LimitExceededError
from blobstore.formats import strictjson
from blobstore.formats.strictjson import (
    Between,
    Document,
    InvalidError,
    Key,
    StrictJsonError,
    check_of,
    validated,
)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"a":1,"a":1}', "duplicate"),
        (b"NaN", "syntax"),
        (b"[1,]", "syntax"),
        (b"\xef\xbb\xbf{}", "syntax"),
        (b'"\xff"', "utf8"),
        (b'"\\ud800"', "utf8"),
        (b"[" * 100_000, "depth"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
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
    with pytest.raises(StrictJsonError, match="values"):
        strictjson.parse(b'{"a":[1,2,3,4,5,6,7,8,9]}', values=9)
    text = r"[{,\\" * 100
    assert strictjson.parse(strictjson.encode([text]), values=2) == [text]
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


VALUES: list[Any] = [
    *(None, True, 0, 1, 8, 2**40, 2**40 + 1, 1.0, 2.5, "", "a", "abcde", "é" * 6, b"a"),
    *([], ["a"], ["a", 1], [None], {"a"}, {}, {"a": 1}, {"a": None}, {"a": [2**40, -5]}),
]
BETWEEN = Annotated[int, Between(1, 2**40)]
BOUNDED = Annotated[int, Field(ge=1, le=2**40)]
CHECKS: dict[str, tuple[Any, Any]] = {
    "text": (str, str),
    "short text": (Annotated[str, Between(0, 5)], Annotated[str, Field(max_length=5)]),
    "integer": (int, int),
    "bounded": (BETWEEN, BOUNDED),
    "one integer": (Literal[1, 8], Literal[1, 8]),
    "one text": (Literal["a", "b"], Literal["a", "b"]),
    "optional": (str | None, str | None),
    "items": (list[str], list[str]),
    "nested": (dict[str, list[BETWEEN] | None], dict[str, list[BOUNDED] | None]),
}


def outcome(check: Callable[[Any], Any], value: Any) -> tuple[object, object]:
    """Return the type and value that a check gives, or the reason and place of its refusal."""
    try:
        given = check(value)
    except InvalidError as error:
        return error.reason, error.place
    except ValidationError as error:
        first = error.errors()[0]
        return first["msg"], first["loc"]
    return type(given), given


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_is_pydantics(name: str) -> None:
    kind, model = CHECKS[name]
    by_pydantic = partial(TypeAdapter(model).validate_python, strict=True)
    for value in VALUES:
        ours, theirs = outcome(check_of(kind), value), outcome(by_pydantic, value)
        is_equal = isinstance(value, bool | float) and isinstance(theirs[0], type)
        if name.startswith("one") and is_equal:  # Literal compares, and True == 1; not here
            assert isinstance(ours[0], str)
        else:
            assert ours == theirs


@dataclass(frozen=True, slots=True)
class Point(Document):
    x: Annotated[int, Key("X")]
    y: int = 7
    tags: list[str] = field(default_factory=list)


WRONG: dict[str, Any] = {"document": [], "tags.1": {"X": 1, "tags": ["a", 2]}}
WRONG["X"] = {"x": 1, "y": "late"}  # keys are compared exactly: not the field's name


@pytest.mark.parametrize("place", WRONG)
def test_the_first_wrong_key_is_named_by_its_place(place: str) -> None:
    assert Point.checked({"X": 1, "z": 2, "tags": ["a"]}) == Point(1, 7, ["a"])
    with pytest.raises(DocumentError, match=f"^the file: {place}: .* [(]rule Z9[)]$"):
        validated(Point, WRONG[place], "the file", "Z9")
