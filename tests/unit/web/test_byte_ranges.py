"""Ranges of bytes."""

from __future__ import annotations

import pytest

from blobstore.web.byte_ranges import ByteSpan, part_of

WHOLE = ByteSpan(0, 10, 10, is_whole=True)


@pytest.mark.parametrize(
    ("field", "part"),
    [
        (None, WHOLE),
        ("bytes=0-9", ByteSpan(0, 10, 10)),
        ("bytes=0-0", ByteSpan(0, 1, 10)),
        ("bytes=3-", ByteSpan(3, 10, 10)),
        ("bytes=9-9", ByteSpan(9, 10, 10)),
        ("bytes=5-99999999999999", ByteSpan(5, 10, 10)),
        ("bytes=-3", ByteSpan(7, 10, 10)),
        ("bytes=-99", ByteSpan(0, 10, 10)),
        ("bytes= 1-2 ", ByteSpan(1, 3, 10)),
        # There are no such bytes.
        ("bytes=10-", None),
        ("bytes=10-20", None),
        ("bytes=-0", None),
        # Not valid, or not one range: ignored (RFC 9110 section 14.2).
        ("bytes=5-4", WHOLE),
        ("bytes=-", WHOLE),
        ("bytes=0-1,3-4", WHOLE),
        ("bytes=a-b", WHOLE),
        ("items=0-1", WHOLE),
        ("bytes=0-1x", WHOLE),
        ("bytes=٣-٤", WHOLE),  # digits, but not ASCII
        (f"bytes={'9' * 5000}-", WHOLE),
    ],
)
def test_what_a_field_asks_for(field: str | None, part: ByteSpan | None) -> None:
    assert part_of(10, field) == part


def test_an_empty_blob_has_no_part() -> None:
    assert part_of(0, "bytes=0-0") is None
    assert part_of(0, "bytes=-1") is None
    assert part_of(0, None) == ByteSpan(0, 0, 0, is_whole=True)


def test_the_field_of_an_answer() -> None:
    assert ByteSpan(3, 7, 10).content_range == "bytes 3-6/10"
    assert ByteSpan(3, 7, 10).nbytes == 4
