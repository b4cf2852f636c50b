"""Headers are written as canonical text, or refused with the rule that the entries break."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from blobstore.errors import HeaderError
from blobstore.formats import strictjson
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import (
    MAX_RANK,
    TensorEntry,
    encode_header,
    lay_out,
    parse_header,
)

strings = st.text(max_size=8)
names = strings.filter(lambda name: name != "__metadata__")
whole = [dtype for dtype in DType if dtype.bits >= 8]
shapes = st.lists(st.integers(0, 2**12), max_size=4).map(tuple)
arrays = st.dictionaries(names, st.tuples(st.sampled_from(whole), shapes), max_size=5)
EVERY_ASCII = "".join(map(chr, range(128)))


@given(arrays, st.dictionaries(strings, strings, max_size=3), st.randoms())
def test_headers_are_canonical_and_read_back(
    tensors: dict[str, Any], metadata: dict[str, str], random: Any
) -> None:
    laid_out = lay_out((name, dtype, shape) for name, (dtype, shape) in tensors.items())
    entries = list(laid_out.items())
    random.shuffle(entries)
    size = sum(entry.nbytes for _, entry in entries)
    try:
        canonical = canonical_text(dict(entries), metadata)
    except UnicodeEncodeError:  # half of a surrogate pair
        with pytest.raises(HeaderError, match="F4"):
            encode_header(dict(entries), metadata, 1)
    else:
        text = encode_header(dict(entries), metadata, 1)[8:]
        assert text == canonical
        header = parse_header(text, size)
        assert (header.tensors, header.metadata) == (dict(entries), metadata)


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


@pytest.mark.parametrize(
    "name", [EVERY_ASCII, "\u2027\u2028\u2029\u202a\ufffe", "é✓😀â", ""], ids=ascii
)
def test_every_name_is_written(name: str) -> None:
    entries = lay_out([(name, DType.F32, (2, 3))])
    text = encode_header(entries, {name: name}, 1)[8:]
    assert text == canonical_text(entries, {name: name})
    header = parse_header(text, 24)
    assert (header.tensors, header.metadata) == (entries, {name: name})


def entry(shape: Any = (1,), begin: Any = 0, end: Any = 1, dtype: Any = DType.U8) -> TensorEntry:
    return TensorEntry(dtype, shape, begin, end)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"a": entry(end=2)}, "F14"),
        ({"a": entry((2**62, 8))}, "F14"),
        ({"a": entry((2**64,))}, "F14"),
        ({"a": entry((3,), dtype=DType.F4)}, "F15"),
        ({"a": entry(begin=1, end=2)}, "F16"),
        ({"a": entry(), "b": entry()}, "F16"),
        ({"a": entry(), "b": entry(begin=2, end=3)}, "F16"),
        ({"a": entry((2,), -1, 1)}, "F16"),
        ({"\ud800": entry()}, "F4"),
        ({"__metadata__": entry()}, "F9"),
    ],
)
def test_wrong_entries_are_refused(wrong: dict[str, TensorEntry], rule: str) -> None:
    with pytest.raises(HeaderError) as caught:
        encode_header(wrong, {}, 8)
    assert caught.value.rule == rule


def test_metadata_that_no_file_can_have_are_refused() -> None:
    with pytest.raises(HeaderError, match="F4"):
        encode_header({}, {"a": "\udfff"}, 8)
    with pytest.raises(HeaderError, match="F9"):
        encode_header({}, {"a": 1}, 8)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "shape", [(1,) * (MAX_RANK + 1), (0, 2**63, 1)], ids=["rank", "dimensions"]
)
def test_rare_entries_are_written(shape: tuple[int, ...]) -> None:
    entries = {"a": entry(shape, 0, 0 if 0 in shape else 1)}
    assert parse_header(encode_header(entries, {}, 8)[8:], None).tensors == entries


@pytest.mark.parametrize("align", [8, 64, 4096])
def test_data_start_at_a_multiple(align: int) -> None:
    for length in range(1, 18):
        written = encode_header(lay_out([("n" * length, DType.F32, (2,))]), {}, align)
        assert len(written) % align == 0
        assert len(written) - len(written.rstrip(b" ")) < align


def test_two_arrays_of_one_name_are_refused() -> None:
    with pytest.raises(HeaderError, match="F8"):
        lay_out([("a", DType.F32, (2,)), ("a", DType.F32, (2,))])
