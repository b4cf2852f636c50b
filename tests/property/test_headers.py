"""Headers: what we encode we parse back, and the safetensors package reads it too.

Noise is never accepted by accident.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from safetensors import deserialize
from support.checkpoints import raw_safetensors

from blobstore.errors import BlobStoreError
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import encode_header, header_of as read_header, lay_out
from blobstore.io.ranges import BytesReader

# The reference library's Python face has no FNUZ or complex types.
COMMON = [
    dtype
    for dtype in DType
    if dtype.bits >= 8 and "FNUZ" not in dtype.value and dtype is not DType.C64
]
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
files = st.dictionaries(names, st.tuples(st.sampled_from(COMMON), shapes), min_size=1, max_size=6)
metadata = st.dictionaries(
    names, st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=3
)


@given(files, metadata, st.sampled_from([8, 64, 16384]))
def test_encoded_headers_are_read_back(
    tensors: dict[str, Any], extra: dict[str, str], align: int
) -> None:
    entries = lay_out((name, dtype, shape) for name, (dtype, shape) in tensors.items())
    size = max(entry.end for entry in entries.values())
    raw = encode_header(entries, extra, align)
    header = read_header(BytesReader(raw + bytes(size)))
    assert header.tensors == entries
    assert header.metadata == extra
    assert header.data_start == len(raw)
    assert len(raw) % align == 0
    assert encode_header(header.tensors, header.metadata, align) == raw
    read = deserialize(raw + bytes(size))
    assert {name: tuple(entry["shape"]) for name, entry in read} == {
        name: entry.shape for name, entry in entries.items()
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**65) | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "U8", "nope"]) | json_values,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | json_values,
    }
)


@given(
    st.dictionaries(st.text(max_size=6), entries | json_values, max_size=3), st.binary(max_size=40)
)
def test_no_input_is_accepted_that_the_reference_refuses(
    document: dict[str, Any], data: bytes
) -> None:
    text = json.dumps(document).encode()
    raw = raw_safetensors(text, data)
    try:
        header = read_header(BytesReader(raw))
    except BlobStoreError:
        return
    assert {name for name, _ in deserialize(raw)} == set(header.tensors)


@pytest.mark.parametrize("text", ["<&>\u2028\u2029é😀", 'a"b\\c\n\x00\x7f'])
def test_escapes_are_those_of_go(text: str) -> None:
    raw = encode_header(lay_out([(text, DType.U8, (0,))]), {}, 8)
    assert not any(character in raw.decode() for character in "<>&\u2028\u2029\n")
    assert list(read_header(BytesReader(raw)).tensors) == [text]
