"""Every .safetensors file of the corpus gets its verdict, by the parser and by the scanner.

What is accepted reads as the reference library reads it (fuzz/headers.py has more of that). The
scanner accepts no more than the parser, and leaves it few legal headers.
"""

import pickle
from pathlib import Path

import pytest
import safetensors
from support.corpus import Case, find, load, refusal

from blobstore import read_header
from blobstore.errors import BlobStoreError, HeaderError, LimitExceededError
from blobstore.formats.dtypes import DType
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

# Inputs that break two rules, where the one that is found first is not the one that the corpus
# names.
OTHER_RULE = {
    "st-ws-trailing-nul-then-junk": "F7",
    "st-ws-trailing-vt-nbsp": "F7",
    "st-hdr-90MB-open-brackets": "F10",
}
# Legal, and left to the parser: unknown fields, and what is beyond our limits.
FOR_THE_PARSER = {"st-info-extra-field", "st-meta-null", "st-name-1MB", "st-shape-65-dims"}
SMALL = [case for case in load("header") if not case.by_recipe]


def assert_same(one: Header | None, other: Header | None) -> None:
    assert one is not None
    assert other is not None
    assert list(one.tensors.items()) == list(other.tensors.items())
    assert list(one.metadata.items()) == list(other.metadata.items())
    assert one.data_start == other.data_start


def test_files_to_accept(tmp_path: Path) -> None:
    for case in (case for case in SMALL if case.accepted):
        path = case.write(tmp_path / case.id)
        header = read_header(path)
        assert_same(header, header_of(BytesReader(case.data)))
        assert safetensors.deserialize(case.data) is not None
        end = max((entry.end for entry in header.tensors.values()), default=0)
        assert header.data_start + end == case.size, case.id


def test_files_to_refuse(tmp_path: Path) -> None:
    for case in (case for case in SMALL if not case.accepted):
        path = case.write(tmp_path / case.id)
        error = refusal(lambda path=path: read_header(path))  # type: ignore[misc]  # bound now
        assert isinstance(error, HeaderError | LimitExceededError), case.id
        assert error.rule == OTHER_RULE.get(case.id, case.rule), error
        assert isinstance(error, LimitExceededError) or str(path) in str(error)
        assert len(str(error)) < 2000
    pointer = find("header", "st-alien-git-lfs-pointer").data
    assert "git-lfs pointer" in str(refusal(lambda: header_of(BytesReader(pointer))))
    odd = header_of(BytesReader(find("header", "st-shape-65-dims").data))  # can only be listed
    assert isinstance(refusal(lambda: odd.check_limits("x")), LimitExceededError)


@pytest.mark.parametrize(
    "case",
    [
        # Those that take a second are for the laboratory.
        pytest.param(case, marks=[pytest.mark.lab] if "sparse" not in case.id else [], id=case.id)
        for case in load("header")
        if case.by_recipe
    ],
)
def test_large_files(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path / "model.safetensors")
    assert path.stat().st_size == (case.size or 2**40)
    if case.accepted:
        assert read_header(path).tensors
    else:
        assert refusal(lambda: read_header(path)).rule == OTHER_RULE.get(case.id, case.rule)


def test_a_file_that_ends_inside_its_header_breaks_f3() -> None:
    text = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    data = len(text).to_bytes(8, "little") + text
    assert list(header_of(BytesReader(data)).tensors) == ["a"]
    for missing in (1, 8, 9):
        with pytest.raises(HeaderError, match="F3"):
            header_of(BytesReader(data[:-missing]))


ENTRY = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


def parsed(text: bytes, data_size: int | None) -> Header | None:
    try:
        return parse_strictly(text, data_size)
    except BlobStoreError:
        return None


def one(entry: bytes, name: bytes = b"a") -> bytes:
    return b'{"' + name + b'":' + entry + b"}"


def entry(dtype: str, shape: str, begin: int, end: int) -> bytes:
    text = f'{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{begin},{end}]}}'
    return text.encode()


def test_the_scanner_agrees_with_the_corpus() -> None:
    declined = set()
    for case in SMALL:
        size = int.from_bytes(case.data[:8], "little")
        text, nbytes = case.data[8 : 8 + size], len(case.data) - 8 - size
        scanned = scan_header(text, nbytes) if nbytes >= 0 else None
        if scanned is not None:
            assert case.accepted, case.id
            assert_same(scanned, parsed(text, nbytes))
        elif case.accepted:
            declined.add(case.id)
    assert declined == FOR_THE_PARSER


LEGAL: list[tuple[bytes, int | None]] = [
    (b"{}", None),
    (b'{"a":' + ENTRY + b',"__metadata__":{"\\u00e9" : "\\\\\\"", "":"\xc3\xa9"} }', 1),
    (one(ENTRY, b"n" * MAX_NAME_BYTES), 1),
    (one(entry("U8", ",".join("1" * MAX_RANK), 0, 1)), 1),
    (one(entry("U8", "2305843009213693951", 0, 2**61 - 1)), 2**61 - 1),
]


def test_legal_texts_are_scanned() -> None:
    for text, size in LEGAL:
        header = scan_header(text, size)
        assert_same(header, parsed(text, size))
        assert_same(pickle.loads(pickle.dumps(header)), header)


def test_impossible_sizes_get_the_parsers_verdict() -> None:
    for size in (-1, 2**64):
        assert scan_header(b"{}", size) is None
        with pytest.raises(HeaderError, match="F17"):
            parse_header(b"{}", size)


def test_the_scanner_knows_every_dtype() -> None:
    for dtype in DType:
        entries = lay_out([("a", dtype, (8,))])
        header = scan_header(encode_header(entries, {}, 1)[8:], dtype.bits)
        assert header is not None
        assert header.tensors == entries
