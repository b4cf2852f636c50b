"""Documents: each check accepts and refuses what pydantic's strict mode does, in its words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from blobstore.errors import DocumentError
from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.documents import Manifest
from blobstore.formats.strictjson import (
    Between,
    Check,
    Document,
    InvalidError,
    Key,
    check_of,
    validated,
)

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, -1, 4, 8, 2**40, 2**40 + 1, 1.0, 2.5, float("inf")),
    *("", "a", "b", "abcde", "abcdef", "é" * 6, b"a"),
    *([], ["a"], ["a", 1], [1], [None], [1, 2, 3], [[]], {"a"}),
    *({}, {"a": 1}, {"a": "b"}, {"a": None}, {"a": 2.0}, {"a": 1, "b": -5}),
]
BOUNDED = Annotated[int, Field(ge=1, le=2**40)]
CHECKS: dict[str, tuple[Any, Any]] = {
    "text": (str, str),
    "short text": (Annotated[str, Between(0, 5)], Annotated[str, StringConstraints(max_length=5)]),
    "integer": (int, int),
    "bounded": (Annotated[int, Between(1, 2**40)], BOUNDED),
    "boolean": (bool, bool),
    "one integer": (Literal[4, 8], Literal[4, 8]),
    "one of three": (Literal[1, 4, 8], Literal[1, 4, 8]),
    "one text": (Literal["a", "b"], Literal["a", "b"]),
    "optional": (str | None, str | None),
    "items": (list[str], list[str]),
    "members": (dict[str, int], dict[str, int]),
    "nested": (
        dict[str, list[Annotated[int, Between(1, 2**40)]] | None],
        dict[str, list[BOUNDED] | None],
    ),
}


def outcome(check: Check, value: Any) -> tuple[object, object]:
    """Return the type and value that a check gives, or the reason and place of its refusal."""
    try:
        given = check(value)
    except InvalidError as error:
        return error.reason, error.place
    return type(given), given


def by_pydantic(model: Any, value: Any) -> tuple[object, object]:
    """Return the outcome of pydantic's strict mode."""
    try:
        given = TypeAdapter(model).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        return first["msg"], first["loc"]
    return type(given), given


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_is_pydantics(name: str) -> None:
    kind, model = CHECKS[name]
    check = check_of(kind)
    ours = {repr(value): outcome(check, value) for value in VALUES}
    theirs = {repr(value): by_pydantic(model, value) for value in VALUES}
    if name.startswith("one"):  # Literal compares, and True == 1: here a bool is not an integer.
        for value in VALUES:
            if isinstance(value, bool | float) and isinstance(theirs[repr(value)][0], type):
                with pytest.raises(InvalidError):
                    check(value)
                del ours[repr(value)], theirs[repr(value)]
    assert ours == theirs


@dataclass(frozen=True, slots=True)
class Point(Document):
    """A document of three keys, of which one has another name and one a default."""

    x: Annotated[int, Key("X")]
    y: int = 7
    tags: list[str] = field(default_factory=list)


def test_a_document_takes_its_keys_and_ignores_others() -> None:
    assert Point.checked({"X": 1, "z": 2, "tags": ["a"]}) == Point(1, 7, ["a"])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "document: Input should be a valid dictionary or instance of Point"),
        ({}, "X: Field required"),
        ({"x": 1}, "X: Field required"),  # keys are compared exactly: not the field's name
        ({"X": "1"}, "X: Input should be a valid integer"),
        ({"X": True, "y": "late"}, "X: Input should be a valid integer"),
        ({"X": 1, "tags": ["a", 2]}, "tags.1: Input should be a valid string"),
    ],
)
def test_the_first_wrong_key_is_named_by_its_place(value: Any, says: str) -> None:
    with pytest.raises(DocumentError) as error:
        validated(Point, value, "the file", "Z9")
    assert error.value.message == f"the file: {says} (rule Z9)"
    assert error.value.rule == "Z9"


DIGEST = f"sha256:{'a' * 64}"
LAYER = {"mediaType": "m", "digest": DIGEST, "size": 1}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"schemaVersion": 2.0}, "document: schemaVersion is not 2"),
        ({"schemaVersion": 1}, "schemaVersion: Input should be 2"),
        ({"layers": {}}, "layers: Input should be a valid tuple"),
        ({"layers": [LAYER, 1]}, "layers.1: Input should be a valid dictionary or instance of De"),
        ({"layers": [LAYER | {"size": -1}]}, "layers.0.size: Input should be greater than or equ"),
        ({"layers": [LAYER | {"digest": "x"}]}, "layers.0.digest: not a digest (sha256: and 64"),
        ({"layers": [{"media_type": "m", **LAYER, "mediaType": 1}]}, "layers.0.mediaType: Input"),
        ({"config": {"mediaType": "m"}}, "config.digest: Field required"),
        ({"mediaType": "x" * 256}, "mediaType: String should have at most 255 characters"),
    ],
)
def test_a_wrong_manifest(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(DocumentError) as error:
        validated(Manifest, {"schemaVersion": 2, "layers": [LAYER], **changed}, "manifest", "M1")
    assert error.value.message.startswith(f"manifest: {says}")


def test_a_module_of_wrong_settings_is_named() -> None:
    settings = {"group_size": 64, "bits": 4, "model.head": {"group_size": 64, "bits": 7}}
    with pytest.raises(DocumentError) as error:
        validated(SourceConfig, {"quantization": settings}, "config.json", "Q1")
    place = "quantization.modules.model.head.bits"
    assert error.value.message == (
        f"config.json: {place}: Input should be 1, 2, 3, 4, 5, 6 or 8 (rule Q1)"
    )
