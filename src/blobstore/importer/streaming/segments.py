"""Segments: consecutive parts of a source's files, in the order in which they are used. Pure.

A segment is fetched in one request, and held in memory while its pieces are made. Files are cut
between the pieces that are made of them, so most pieces need one segment. The cuts depend on the
plan only, so every run of the plan has the same segments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise

from blobstore.source.weights import SourceFile

_MIB = 2**20
_AIM, _WINDOW = 8 * _MIB, 128 * _MIB
_LEAST_AIM, _LEAST_WINDOW = 4 * _MIB, 16 * _MIB
_PART = 25
_AT_ONCE = _LEAST_WINDOW // _LEAST_AIM
_LEAST_STEP = 64 * 2**10
Span = tuple[int, int]
"""Bytes of a file: begin and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSizes:
    """How large segments are, in bytes.

    ``aim``: a segment of at least so many bytes is not continued. ``most``: no segment is larger.
    ``window``: bytes of all segments that are in memory at once; `of` chooses them. ``gap``: bytes
    between two needed ranges that are fetched rather than asked for in two requests. ``step``: as
    many bytes of a segment are kept on the disk as soon as they have come; None: what is in memory
    may be lost.
    """

    aim: int = _AIM
    most: int = 2 * _AIM
    window: int = _WINDOW
    gap: int = 2**16
    step: int | None = None

    @classmethod
    def of(cls, nbytes: int) -> SegmentSizes:
        """Return the sizes for a source of so many bytes.

        A killed import loses a 25th of the source at most: what is in memory, or has come since
        the last step.
        """
        part = nbytes // _PART
        window = min(max(part, _LEAST_WINDOW), _WINDOW)
        aim = min(max(window // 8, _LEAST_AIM), _AIM)
        step = max(part // _AT_ONCE, _LEAST_STEP) if part < _LEAST_WINDOW else None
        return cls(aim=aim, most=2 * aim, window=window, step=step)


@dataclass(frozen=True, slots=True)
class SourceSegment:
    """Bytes ``begin`` to ``end`` of a file. ``number``: its place among all segments."""

    number: int
    file: SourceFile
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.end - self.begin

    @property
    def ends_file(self) -> bool:
        """True if it has the last byte of its file."""
        return self.end == self.file.size


class _CutFile:
    """The segments of one file, of which the first has the number ``first``."""

    def __init__(self, file: SourceFile, first: int, spans: Sequence[Span]) -> None:
        self.file = file
        self.first = first
        self.spans = spans
        self._begins = [begin for begin, _ in spans]

    @property
    def stop(self) -> int:
        return self.first + len(self.spans)

    def numbers(self, begin: int, end: int) -> range:
        first = bisect_right(self._begins, begin) - 1
        last = bisect_right(self._begins, max(begin, end - 1)) - 1
        return range(self.first + first, self.first + last + 1)


class SourceSegments:
    """All segments of a plan's files, in their order: file by file.

    ``hashed``: the paths of the files that are hashed whole.
    """

    def __init__(
        self,
        files: Iterable[tuple[SourceFile, Sequence[Span]]],
        hashed: AbstractSet[str] = frozenset(),
    ) -> None:
        self.hashed = hashed
        self.count = 0
        self._cut: dict[str, _CutFile] = {}
        for file, spans in files:
            self._cut[file.path] = cut = _CutFile(file, self.count, spans)
            self.count = cut.stop
        self._files = list(self._cut.values())
        self._firsts = [cut.first for cut in self._files]

    def __getitem__(self, number: int) -> SourceSegment:
        cut = self._files[bisect_right(self._firsts, number) - 1]
        return SourceSegment(number, cut.file, *cut.spans[number - cut.first])

    def numbers(self, path: str, begin: int, end: int) -> range:
        """Return the numbers of the segments that have bytes ``begin`` to ``end`` of a file."""
        return self._cut[path].numbers(begin, end) if end > begin else range(0)

    def of_file(self, path: str) -> range:
        """Return the numbers of a file's segments."""
        cut = self._cut[path]
        return range(cut.first, cut.stop)


def spans_of(
    needs: Iterable[Sequence[Span]], sizes: SegmentSizes, size: int, *, is_whole: bool
) -> list[Span]:
    """Return the segments of a file of ``size`` bytes.

    ``needs``: for each thing that is made in one piece, the bytes that it needs of the file.
    ``is_whole``: all bytes are fetched, because the file is hashed.
    """
    spans: list[Span] = []
    ranges: list[Span] = []
    for several in needs:
        ranges += several
        begin, end = min(one[0] for one in several), max(one[1] for one in several)
        spans += [(begin, end)] if end - begin <= sizes.most else several
    units = list(_units(_merged(spans), _merged(ranges), sizes))
    if is_whole:
        units = list(_filled(units, size, sizes))
    return list(_packed(units, sizes))


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, those that overlap as one; spans that only touch stay apart."""
    merged: list[Span] = []
    for begin, end in sorted(set(spans)):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif begin < end:
            merged.append((begin, end))
    return merged


def _units(blocks: list[Span], ranges: list[Span], sizes: SegmentSizes) -> Iterator[Span]:
    """Yield what a segment should not cut through: blocks, or parts of those that are too large."""
    starts = [begin for begin, _ in ranges]
    for begin, end in blocks:
        if end - begin <= sizes.most:
            yield begin, end
            continue
        first = max(0, bisect_right(starts, begin) - 1)
        inside = [one for one in ranges[first : bisect_right(starts, end - 1)] if one[1] > begin]
        for inner in inside:
            yield from _pieces(*inner, sizes) if inner[1] - inner[0] > sizes.most else [inner]


def _pieces(begin: int, end: int, sizes: SegmentSizes) -> Iterator[Span]:
    yield from pairwise([*range(begin, end, sizes.aim), end])


def _filled(units: Iterable[Span], size: int, sizes: SegmentSizes) -> Iterator[Span]:
    """Yield the units and, in pieces, what lies before, between and behind them."""
    at = 0
    for begin, end in units:
        yield from _pieces(at, begin, sizes) if begin > at else ()
        yield begin, end
        at = end
    yield from _pieces(at, size, sizes) if size > at else ()


def _packed(units: Iterable[Span], sizes: SegmentSizes) -> Iterator[Span]:
    """Yield segments: units until they are large enough, or the next one would be too much."""
    at: Span | None = None
    for begin, end in units:
        if at is not None and (
            at[1] - at[0] >= sizes.aim or end - at[0] > sizes.most or begin - at[1] > sizes.gap
        ):
            yield at
            at = None
        at = (begin if at is None else at[0], end)
    if at is not None:
        yield at
