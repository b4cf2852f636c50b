"""Headers are written as canonical text that everyone reads, or refused with the broken rule."""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from safetensors import deserialize

from blobstore.errors import HeaderError
from blobstore.formats import strictjson
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import (
    MAX_RANK,
    TensorEntry,
    encode_header,
    header_of,
    lay_out,
    parse_header,
)
from blobstore.io.ranges import BytesReader

strings = st.text(st.characters(codec="utf-8"), max_size=8)
names = strings.filter(lambda name: name != "__metadata__")
# The reference library's Python face has no FNUZ or complex types.
usual = [one for one in DType if one.bits >= 8 and "FNUZ" not in one.value and one != DType.C64]
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
arrays = st.dictionaries(names, st.tuples(st.sampled_from(usual), shapes), min_size=1, max_size=5)
EVERY_ASCII = "".join(map(chr, range(128)))


@settings(max_examples=25)
@given(arrays, st.dictionaries(strings, strings, max_size=3), st.sampled_from([1, 8, 4096]))
def test_headers_come_back(tensors: dict[str, Any], metadata: dict[str, str], align: int) -> None:
    entries = lay_out((name, dtype, shape) for name, (dtype, shape) in tensors.items())
    size = max(entry.end for entry in entries.values())
    raw = encode_header(dict(reversed(entries.items())), metadata, align)
    assert raw[8:].rstrip(b" ") == canonical_text(entries, metadata)
    assert len(raw) % align == 0
    assert len(raw) - len(raw.rstrip(b" ")) < align
    header = header_of(BytesReader(raw + bytes(size)))
    assert (header.tensors, header.metadata) == (entries, metadata)
    assert header.data_start == len(raw)
    read = {name: tuple(entry["shape"]) for name, entry in deserialize(raw + bytes(size))}
    assert read == {name: entry.shape for name, entry in entries.items()}


def canonical_text(tensors: dict[str, TensorEntry], metadata: dict[str, str]) -> bytes:
    """Return what Go's encoding/json writes for a header's document, by a slow and plain way."""
    document: dict[str, Any] = {
        name: {
            "dtype": str(entry.dtype),
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
        for name, entry in tensors.items()
    }
    if metadata:
        document["__metadata__"] = dict(sorted(metadata.items()))
    return strictjson.encode(dict(sorted(document.items())))


@pytest.mark.parametrize("name", [EVERY_ASCII, "\u2027\u2028\u202a\ufffe<&>", "é😀"], ids=ascii)
def test_every_name_is_written(name: str) -> None:
    entries = lay_out([(name, DType.F32, (2, 3))])
    text = encode_header(entries, {name: name}, 1)[8:]
    assert text == canonical_text(entries, {name: name})
    assert not any(character in text.decode() for character in "<>&\u2028\n")
    header = parse_header(text, 24)
    assert (header.tensors, header.metadata) == (entries, {name: name})


def entry(shape: Any = (1,), begin: Any = 0, end: Any = 1, dtype: Any = DType.U8) -> TensorEntry:
    return TensorEntry(dtype, shape, begin, end)


WRONG: list[tuple[dict[str, TensorEntry], dict[str, Any], str]] = [
    ({"a": entry(end=2)}, {}, "F14"),
    ({"a": entry((2**64,))}, {}, "F14"),
    ({"a": entry((3,), dtype=DType.F4)}, {}, "F15"),
    ({"a": entry(begin=1, end=2)}, {}, "F16"),
    ({"a": entry(), "b": entry()}, {}, "F16"),
    ({"a": entry((2,), -1, 1)}, {}, "F16"),
    ({"\ud800": entry()}, {}, "F4"),
    ({"__metadata__": entry()}, {}, "F9"),
    ({}, {"a": "\udfff"}, "F4"),
    ({}, {"a": 1}, "F9"),
]


def test_wrong_entries() -> None:
    for wrong, metadata, rule in WRONG:
        with pytest.raises(HeaderError) as caught:
            encode_header(wrong, metadata, 8)
        assert caught.value.rule == rule


def test_rare_entries_are_written_and_no_name_twice() -> None:
    entries = {"a": entry((1,) * (MAX_RANK + 1)), "b": entry((0, 2**63, 1), 1, 1)}
    assert parse_header(encode_header(entries, {}, 8)[8:], None).tensors == entries
    with pytest.raises(HeaderError, match="F8"):
        lay_out([("a", DType.F32, (2,)), ("a", DType.F32, (2,))])
