"""Strict JSON: RFC 8259 and no more; encoding as Go's encoding/json; checked documents."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from support.checkpoints import safetensors_bytes
from support.corpus import Case, accepted, refusal, rejected

from blobstore.errors import CorruptDataError, DocumentError, LimitExceededError, NotFoundError
from blobstore.formats import strictjson
from blobstore.formats.strictjson import (
    Between,
    Document,
    InvalidError,
    Key,
    StrictJsonError,
    check_of,
    parse_document,
)
from blobstore.source.inventory import read_inventory

REFUSED = {
    b'{"a":1,"a":1}': "duplicate",
    b"NaN": "syntax",
    b"[1,]": "syntax",
    b"\xef\xbb\xbf{}": "syntax",
    b'"\xff"': "utf8",
    b'"\\ud800"': "utf8",
    b"[" * 100_000: "depth",
}


def test_what_is_refused() -> None:
    for raw, reason in REFUSED.items():
        with pytest.raises(StrictJsonError) as caught:
            strictjson.parse(raw)
        assert caught.value.reason == reason, raw[:20]


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


BOUNDED = Annotated[int, Between(1, 2**40)]
NESTED = dict[str, list[BOUNDED] | None]


def test_checks_are_strict() -> None:
    taken: list[tuple[Any, Any]] = [
        (int, 2**70),
        (BOUNDED, 2**40),
        (Annotated[str, Between(0, 5)], "é" * 5),
        (Literal[1, 8], 8),
        (str | None, None),
        (NESTED, {"a": [1], "b": None}),
    ]
    for kind, value in taken:
        assert check_of(kind)(value) == value
    refused: list[tuple[Any, Any]] = [
        *((int, value) for value in (True, 1.0, "1", None)),
        *((BOUNDED, value) for value in (0, 2**40 + 1)),
        *((Literal[1, 8], value) for value in (2, True, 1.0)),
        (Annotated[str, Between(0, 5)], "é" * 6),
        (str, b"a"),
        (list[str], {"a"}),
    ]
    for kind, value in refused:
        with pytest.raises(InvalidError):
            check_of(kind)(value)
    with pytest.raises(InvalidError) as caught:
        check_of(NESTED)({"a": [1, -5]})
    assert caught.value.place == ("a", 1)


@dataclass(frozen=True, slots=True)
class Point(Document):
    x: Annotated[int, Key("X")]
    y: int = 7
    tags: list[str] = field(default_factory=list)


WRONG: dict[str, Any] = {"document": [], "tags.1": {"X": 1, "tags": ["a", 2]}}
WRONG["X"] = {"x": 1, "y": "late"}  # keys are compared exactly: not the field's name


def test_the_first_wrong_key_is_named_by_its_place() -> None:
    assert Point.from_json({"X": 1, "z": 2, "tags": ["a"]}) == Point(1, 7, ["a"])
    for place, wrong in WRONG.items():
        with pytest.raises(DocumentError, match=f"^the file: {place}: .* [(]rule Z9[)]$"):
            parse_document(Point, wrong, "the file", "Z9")


SHARDS = {"model-00001-of-00002.safetensors": "a", "model-00002-of-00002.safetensors": "b"}
OTHER_SHARDS = {
    "index-dup-name": {"m1.safetensors": "a", "m2.safetensors": "a"},
    "index-total-size-float": {"m.safetensors": "a"},
    "index-tensor-in-two-shards": {"m1.safetensors": "a", "m2.safetensors": "a"},
}


def write_index_folder(case: Case, folder: Path) -> dict[str, str]:
    """Write the folder that an index case is about; return its shards: file name and tensor.

    All tensors together have 8 bytes: the ``total_size`` of the accepted cases.
    """
    folder.mkdir()
    shards = OTHER_SHARDS.get(case.id, SHARDS)
    values = np.arange(2 // len(shards), dtype=np.float32)
    for file, name in shards.items():
        (folder / file).write_bytes(safetensors_bytes({name: values + ord(name)}))
    case.write(folder / "model.safetensors.index.json")
    return shards


def test_indexes_to_accept(tmp_path: Path) -> None:
    for case in accepted("index"):
        folder = tmp_path / case.id
        shards = write_index_folder(case, folder)
        inventory = read_inventory(folder)
        assert {tensor.file.name: name for name, tensor in inventory.tensors.items()} == shards
        assert list(inventory.tensors) == sorted(shards.values())
        for name, tensor in inventory.tensors.items():
            stored = Path(tensor.file.path).read_bytes()[tensor.offset :][: tensor.nbytes]
            assert np.frombuffer(stored, np.float32)[0] == ord(name)
        assert inventory.left_out == ()


def test_indexes_to_refuse(tmp_path: Path) -> None:
    for case in rejected("index"):
        folder = tmp_path / case.id
        shards = write_index_folder(case, folder)
        (folder / "pytorch_model.bin").touch()  # and is not read instead
        error = refusal(lambda folder=folder: read_inventory(folder))  # type: ignore[misc]  # bound now
        is_missing = case.id == "index-missing-shard"
        assert isinstance(error, NotFoundError if is_missing else CorruptDataError)
        assert error.rule == case.rule
        assert str(folder) in str(error)
        for file, name in shards.items():  # nothing is wrong with the shards
            assert list(read_inventory(folder / file).tensors) == [name]
