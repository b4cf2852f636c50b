"""The scanner and the parser agree: the parser accepts what the scanner accepts."""

from __future__ import annotations

import pickle
import re

import pytest
from support import ROOT
from support.corpus import Case, case_id, load

from blobstore.errors import BlobStoreError, HeaderError
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors import _native
from blobstore.formats.safetensors.header import (
    MAX_NAME_BYTES,
    MAX_RANK,
    Header,
    encode_header,
    header_of,
    lay_out,
    parse_header,
    parse_strictly,
    scan_header,
)
from blobstore.io.ranges import BytesReader

# Legal, and left to the parser: unknown fields, and what is beyond our limits.
FOR_THE_PARSER = {"st-info-extra-field", "st-meta-null", "st-name-1MB", "st-shape-65-dims"}
ENTRY = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


def split(case: Case) -> tuple[bytes, int] | None:
    """Return a file's header text and the size of its data, where it has both."""
    data = case.data
    size = int.from_bytes(data[:8], "little")
    return (data[8 : 8 + size], len(data) - 8 - size) if 8 + size <= len(data) else None


def parsed(text: bytes, data_size: int | None) -> Header | None:
    try:
        return parse_strictly(text, data_size)
    except BlobStoreError:
        return None


def one(entry: bytes, name: bytes = b"a") -> bytes:
    return b'{"' + name + b'":' + entry + b"}"


CASES = [case for case in load("header") if not case.by_recipe and split(case) is not None]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_twins_agree_on_the_corpus(case: Case) -> None:
    text, size = split(case) or (b"", 0)
    scanned = scan_header(text, size)
    if scanned is not None:
        assert case.accepted
        assert_same(scanned, parsed(text, size))


def test_the_scanner_declines_few_legal_headers() -> None:
    declined = {
        case.id
        for case in CASES
        if case.accepted and scan_header(*(split(case) or (b"", 0))) is None
    }
    assert declined == FOR_THE_PARSER


def entry(dtype: str, shape: str, begin: int, end: int) -> bytes:
    return b'{"dtype":"%b","shape":[%b],"data_offsets":[%d,%d]}' % (
        dtype.encode(),
        shape.encode(),
        begin,
        end,
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (b"{}", 0),
        (b"{}", None),
        (b'{ "a" :\t' + ENTRY + b"\r\n}   ", 1),
        (b'{"__metadata__":{},"a":' + ENTRY + b"}", 1),
        (b'{"a":' + ENTRY + b',"__metadata__":{"\\u00e9" : "\\\\\\"", "":"\xc3\xa9"} }', 1),
        (one(ENTRY, rb"\u00e9\"\\\ud83d\ude00\/"), None),
        (one(ENTRY, "é😀\x7f".encode()), None),
        (one(ENTRY, b"n" * MAX_NAME_BYTES), 1),
        (one(ENTRY.replace(b'"shape":[1],', b"").replace(b"}", b',"shape": [ 1 ]}')), 1),
        (one(entry("U8", ",".join("1" * MAX_RANK), 0, 1)), 1),
        (one(entry("I8", "0,2305843009213693951", 0, 0)), 0),
        (one(entry("U8", "2305843009213693951", 0, 2**61 - 1)), 2**61 - 1),
        (
            b'{"b":'
            + entry("U8", "2", 1, 3)
            + b',"c":'
            + entry("U8", "0", 1, 1)
            + b',"a":'
            + ENTRY
            + b"}",
            3,
        ),
    ],
    ids=[f"text {number}" for number in range(13)],
)
def test_legal_texts_are_scanned(text: bytes, size: int | None) -> None:
    assert_same(scan_header(text, size), parsed(text, size))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (one(ENTRY.replace(b"}", b',"x":null}')), 1),
        (one(ENTRY.replace(b"dtype", rb"\u0064type")), 1),
        (rb'{"\u005f_metadata__":{}}', 0),
        (one(ENTRY, b"n" * (MAX_NAME_BYTES + 1)), 1),
        (one(entry("U8", ",".join("1" * (MAX_RANK + 1)), 0, 1)), 1),
        (one(entry("F64", "0,18446744073709551615", 0, 0)), 0),
    ],
    ids=["unknown field", "escaped field", "escaped metadata", "long name", "rank", "dimensions"],
)
def test_rare_legal_texts_are_left_to_the_parser(text: bytes, size: int) -> None:
    assert scan_header(text, size) is None
    assert parsed(text, size) is not None


@pytest.mark.parametrize(
    "offsets", [b"[]", b"[0]", b"[1]", b"[0,0,1]", b"[0,1,1]", b"[0,1,0,1]", b"[[0,1]]"]
)
@pytest.mark.parametrize("size", [0, 1])
def test_offsets_that_are_not_two_are_declined(offsets: bytes, size: int) -> None:
    assert (
        scan_header(one(b'{"dtype":"U8","shape":[%d],"data_offsets":%b}' % (size, offsets)), size)
        is None
    )


@pytest.mark.parametrize("size", [-1, 2**64])
def test_impossible_sizes_get_the_parsers_verdict(size: int) -> None:
    assert scan_header(b"{}", size) is None
    with pytest.raises(HeaderError, match="F17"):
        parse_header(b"{}", size)


def test_the_scanner_knows_every_dtype() -> None:
    source = (ROOT / "src/blobstore/formats/safetensors/scan.h").read_text()
    table = {name: int(bits) for name, bits in re.findall(r'\{"(\w+)", (\d+)\}', source)}
    assert table == {dtype.value: dtype.bits for dtype in DType}
    for dtype in DType:
        entries = lay_out([("a", dtype, (8,))])
        header = scan_header(encode_header(entries, {}, 1)[8:], dtype.bits)
        assert header is not None
        assert header.tensors == entries


@pytest.mark.parametrize("dim", [2**60, 2**61 - 1, 2**61, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("dtype", ["F4", "U8", "F64"])
def test_what_is_scanned_is_within_the_limit_of_dimensions(dtype: str, dim: int) -> None:
    text = one(entry(dtype, f"0,{dim}", 0, 0))
    header = parsed(text, 0)
    assert header is not None
    if scan_header(text, 0) is not None:
        header.check_limits("x")


def test_a_scanned_header_survives_pickling() -> None:
    header = scan_header(b'{"b":' + entry("U8", "2", 1, 3) + b',"a":' + ENTRY + b"}", 3)
    assert header is not None
    assert list(header.tensors) == ["b", "a"]
    assert_same(pickle.loads(pickle.dumps(header)), header)


def test_the_table_has_no_more_entries_than_it_has() -> None:
    found = _native.scan(b"{}", 0, str)
    assert found is not None
    with pytest.raises(IndexError):
        found[1].fields(0)


def assert_same(one: Header | None, other: Header | None) -> None:
    assert one is not None
    assert other is not None
    assert list(one.tensors.items()) == list(other.tensors.items())
    assert list(one.metadata.items()) == list(other.metadata.items())
    assert one.data_start == other.data_start


@pytest.mark.parametrize("missing", [1, 7, 8, 9])
def test_a_file_that_ends_inside_its_header_breaks_f3(missing: int) -> None:
    text = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    data = len(text).to_bytes(8, "little") + text
    assert list(header_of(BytesReader(data)).tensors) == ["a"]
    with pytest.raises(HeaderError) as caught:
        header_of(BytesReader(data[:-missing]))
    assert caught.value.rule == "F3"
