"""Segments: they have all needed bytes once, none is too large, and few things need several."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from blobstore.importer.streaming.segments import SegmentSizes, Span, spans_of

SIZES = SegmentSizes(aim=100, most=200, window=400, gap=10)


def covers(segments: list[Span], span: Span) -> bool:
    """Return True if all bytes of a span are in segments that touch."""
    at = span[0]
    for begin, end in segments:
        if begin <= at < end:
            at = end
    return at >= span[1]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_whole", [False, True])
def test_any_needs(seed: int, is_whole: bool) -> None:
    random = Random(seed)
    size = random.randrange(1, 5000)
    longest = random.choice([20, 150, 1000])

    def span() -> Span:
        begin = random.randrange(size)
        return begin, min(size, begin + random.randint(1, longest))

    needs = [[span() for _ in range(random.randint(1, 3))] for _ in range(random.randint(1, 60))]
    segments = spans_of(needs, SIZES, size, is_whole=is_whole)
    assert all(0 <= begin < end <= size and end - begin <= SIZES.most for begin, end in segments)
    assert all(first[1] <= second[0] for first, second in pairwise(segments))
    assert all(covers(segments, one) for several in needs for one in several)
    if is_whole:
        assert covers(segments, (0, size))
    assert segments == spans_of(reversed(needs), SIZES, size, is_whole=is_whole)


def test_consecutive_things_are_not_cut() -> None:
    needs = [[(begin, begin + 30)] for begin in range(0, 3000, 30)]
    segments = spans_of(needs, SIZES, 3000, is_whole=False)
    assert segments[:2] == [(0, 120), (120, 240)]
    assert all(begin % 30 == 0 for begin, _ in segments)


def test_what_belongs_together_is_in_one_segment_if_it_fits() -> None:
    needs = [[(0, 90)], [(90, 130), (240, 250)], [(130, 240)]]
    assert spans_of(needs, SIZES, 300, is_whole=False) == [(0, 90), (90, 250)]


def test_unneeded_bytes_are_left_out_unless_they_are_few() -> None:
    needs = [[(100, 150)], [(155, 170)], [(1000, 1010)]]
    assert spans_of(needs, SIZES, 2000, is_whole=False) == [(100, 170), (1000, 1010)]


@pytest.mark.parametrize("nbytes", [0, 10**6, 10**8, 1_880_000_000, 10**12])
def test_what_a_kill_may_lose_is_small(nbytes: int) -> None:
    sizes = SegmentSizes.of(nbytes)
    assert sizes.window <= max(nbytes // 20, 16 * 2**20)
    assert 2 * 2**20 <= sizes.aim <= 8 * 2**20
    assert sizes.most <= 16 * 2**20
    assert sizes.window >= 2 * sizes.most
