"""A header pattern gives the bytes of `encode_header`, whatever the tensor's name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from blobstore.errors import HeaderError, LimitExceededError
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import HeaderPattern, encode_header, lay_out
from blobstore.io.budget import MAX_HEADER

SUFFIXES = ("", ".scale", ".bias", ".global_scale")
whole = [dtype for dtype in DType if dtype.bits >= 8]
shapes = st.lists(st.integers(0, 2**12), max_size=4).map(tuple)
arrays = st.dictionaries(
    st.sampled_from(SUFFIXES), st.tuples(st.sampled_from(whole), shapes), min_size=1
)
strings = st.text(max_size=8)
# Beginnings and continuations of the metadata's key, which is sorted among the names.
names = strings | st.sampled_from(
    ["", "_", "__metadata", "__metadata__x", "__metadata__", "a", "A"]
)


@given(arrays, st.dictionaries(strings, strings, max_size=3), names, st.sampled_from([1, 8, 4096]))
def test_a_pattern_is_the_header_of_every_name(
    kinds: dict[str, Any], metadata: dict[str, str], name: str, align: int
) -> None:
    stored = [(suffix, dtype, shape) for suffix, (dtype, shape) in kinds.items()]
    try:
        named = lay_out((name + suffix, dtype, shape) for suffix, dtype, shape in stored)
        expected = encode_header(named, metadata, align)
    except HeaderError as error:
        if name != "__metadata__" or "" in kinds:
            with pytest.raises(HeaderError, match=error.rule):
                HeaderPattern(stored, metadata, align).header(name)
    else:
        if name == "__metadata__":  # the suffixes alone are other names; no tensor has this one
            return
        assert HeaderPattern(stored, metadata, align).header(name) == expected


def test_a_header_beyond_the_format_is_refused() -> None:
    pattern = HeaderPattern([("", DType.U8, (0,))], {}, 8)
    with pytest.raises(LimitExceededError):
        pattern.header("n" * MAX_HEADER)
