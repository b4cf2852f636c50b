"""The header's text: an edit changes the metadata and nothing else."""

import json
from typing import Any

from hypothesis import given, settings, strategies as st

from blobstore.formats.safetensors.header import parse_header
from blobstore.inspection.metadata import header_text, new_length, spread

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
MAPS = st.dictionaries(TEXT, TEXT, max_size=4)
SPACES = st.text("  \t\r\n", max_size=3)


@st.composite
def headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """Return a valid header text with white space wherever JSON allows it, and its data."""
    entries: list[tuple[str, Any]] = []
    begin = 0
    for name in draw(
        st.lists(TEXT.filter(lambda text: text != "__metadata__"), max_size=4, unique=True)
    ):
        size = draw(st.integers(0, 5))
        fields: dict[str, Any] = {"dtype": "U8", "shape": [size], "odd": draw(MAPS)}
        fields["data_offsets"] = [begin, begin + size]
        entries.append((name, dict(draw(st.permutations([*fields.items()])))))
        begin += size
    if draw(st.booleans()):
        entries.insert(draw(st.integers(0, len(entries))), ("__metadata__", draw(MAPS)))
    ascii_only = draw(st.booleans())

    def spaced(value: object) -> str:
        return draw(SPACES) + json.dumps(value, ensure_ascii=ascii_only) + draw(SPACES)

    members = (f"{spaced(key)}:{spaced(value)}" for key, value in entries)
    text = f"{{{','.join(members)}{draw(SPACES)}}}{' ' * draw(st.integers(0, 60))}"
    return text.encode(), begin


def without_metadata(text: bytes) -> list[tuple[str, Any]]:
    pairs = json.loads(text, object_pairs_hook=list)
    return [pair for pair in pairs if pair[0] != "__metadata__"]


@settings(max_examples=20)
@given(headers(), MAPS, st.sampled_from([8, 1000, 4096, 16_384]))
def test_metadata_change(
    header: tuple[bytes, int], metadata: dict[str, str], data_start: int
) -> None:
    old, data_size = header
    parsed = parse_header(old, data_size)
    head, tail = header_text(old, metadata)
    least = len(head) + len(tail)
    for length in (least, least + 5, new_length(least, data_start)):
        text = spread(head, tail, length, min(3, length - least))
        assert len(text) == length
        again = parse_header(text, data_size)
        assert dict(again.metadata) == metadata
        assert dict(again.tensors) == dict(parsed.tensors)
        assert without_metadata(text) == without_metadata(old)
    assert header_text(b"".join((head, tail)), metadata) == (head, tail)
