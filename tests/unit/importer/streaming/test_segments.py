"""Segments: they have all needed bytes once, none is too large, and few things need several."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest

from blobstore.importer.streaming.segments import SegmentSizes, SourceSegments, Span, spans_of
from blobstore.source.weights import SourceFile

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


def test_two_files_take_turns() -> None:
    """Of files with 3, 1, 0 and 2 segments."""
    counts = {"a": 3, "b": 1, "none": 0, "c": 2}
    # Only the path of a file is used.
    files = {path: cast("SourceFile", SimpleNamespace(path=path)) for path in counts}
    cut = [(files[path], [(10 * i, 10 * i + 10) for i in range(n)]) for path, n in counts.items()]
    segments = SourceSegments(cut)
    order = [segments[number] for number in range(segments.count)]
    assert [(one.file.path, one.begin) for one in order] == [
        ("a", 0),
        ("b", 0),
        ("a", 10),
        ("c", 0),
        ("a", 20),
        ("c", 10),
    ]
    assert [one.number for one in order] == list(range(6))
    assert segments.of_file("a") == [0, 2, 4]
    assert segments.numbers("a", 5, 25) == [0, 2, 4]
    assert segments.numbers("c", 10, 11) == [5]
    assert not segments.numbers("c", 10, 10)
