"""Segments: they have all needed bytes once, none is too large, and runs are not cut."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from blobstore.importer import segments
from blobstore.importer.segments import Span, _cut


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT", 200)
    monkeypatch.setattr(segments, "_GAP", 10)


def covers(cut: list[Span], span: Span) -> bool:
    """Return True if all bytes of a span are in segments that touch."""
    at = span[0]
    for begin, end in cut:
        if begin <= at < end:
            at = end
    return at >= span[1]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("hashed", [None, 0, 30])
def test_any_needs(seed: int, hashed: int | None) -> None:
    random = Random(seed)
    first = hashed or 0
    size = random.randrange(first + 1, 5000)
    longest = random.choice([20, 150, 1000])

    def span() -> Span:
        begin = random.randrange(first, size)
        return begin, min(size, begin + random.randint(1, longest))

    needs = {span() for _ in range(random.randint(1, 100))}
    cut = list(_cut(needs, hashed, size))
    assert all(first <= begin < end <= size and end - begin <= 200 for begin, end in cut)
    assert all(one[1] <= other[0] for one, other in pairwise(cut))
    assert all(covers(cut, one) for one in needs)
    assert hashed is None or covers(cut, (hashed, size))


def test_consecutive_runs_are_not_cut() -> None:
    needs = {(begin, begin + 30) for begin in range(0, 3000, 30)}
    cut = list(_cut(needs, None, 3000))
    assert cut[:2] == [(0, 180), (180, 360)]
    assert all(begin % 30 == 0 for begin, _ in cut)


def test_unneeded_bytes_are_left_out_unless_they_are_few() -> None:
    needs = {(100, 150), (155, 170), (1000, 1010)}
    assert list(_cut(needs, None, 2000)) == [(100, 170), (1000, 1010)]
