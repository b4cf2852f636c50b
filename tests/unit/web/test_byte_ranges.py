"""Ranges of bytes."""

from __future__ import annotations

import pytest

from blobstore.web.distribution import part_of

WHOLE, MISSING = None, range(0)


@pytest.mark.parametrize(
    ("field", "part"),
    [
        (None, WHOLE),
        ("bytes=0-9", range(10)),
        ("bytes=0-0", range(1)),
        ("bytes=3-", range(3, 10)),
        ("bytes=9-9", range(9, 10)),
        (f"bytes=5-{'9' * 18}", range(5, 10)),
        (f"bytes={'0' * 17}5-", range(5, 10)),
        ("bytes=-3", range(7, 10)),
        ("bytes=-99", range(10)),
        ("bytes= 1-2 ", range(1, 3)),
        # There are no such bytes.
        ("bytes=10-", MISSING),
        ("bytes=10-20", MISSING),
        ("bytes=-0", MISSING),
        # Not valid, or not one range: ignored (RFC 9110 section 14.2).
        ("bytes=5-4", WHOLE),
        ("bytes=-", WHOLE),
        ("bytes=0-1,3-4", WHOLE),
        ("bytes=a-b", WHOLE),
        ("items=0-1", WHOLE),
        ("bytes=0-1x", WHOLE),
        ("bytes=٣-٤", WHOLE),  # digits, but not ASCII
        (f"bytes={'9' * 19}-", WHOLE),
        (f"bytes=0-{'9' * 19}", WHOLE),
    ],
)
def test_what_a_field_asks_for(field: str | None, part: range | None) -> None:
    assert part_of(10, field) == part


def test_an_empty_blob_has_no_part() -> None:
    assert part_of(0, "bytes=0-0") == range(0)
    assert part_of(0, "bytes=-1") == range(0)
    assert part_of(0, None) is None
