"""Segments: parts of a source's files, in the order in which they are fetched. Pure.

A segment is fetched in one request, and is in memory while blobs are made of it. Files are fetched
one after the other, each from its beginning to its end, because its declared digest is that of all
its bytes. Files are cut between the bytes of runs, so most runs need one segment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from blobstore.importer.making import Run, runs_of
from blobstore.importer.needs import Need, needed_by
from blobstore.importer.planning.outputs import PlannedBlob
from blobstore.source.weights import SourceFile

SEGMENT = 8 * 2**20
"""Bytes of a segment at most."""
_GAP = 2**16
"""Bytes between two needed ranges that are fetched rather than asked for in two requests."""
Span = tuple[int, int]
"""Bytes of a file: begin and end."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes ``begin`` to ``end`` of a file. ``number``: its place among all segments."""

    number: int
    file: SourceFile
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.end - self.begin


class Segments(Sequence[Segment]):
    """The segments of what ``blobs`` are made from, in the order of ``files``.

    ``hashed``: of each file that is hashed to its end, the offset from which on it is.
    """

    def __init__(
        self,
        files: Iterable[SourceFile],
        blobs: Iterable[PlannedBlob],
        hashed: Mapping[str, int],
    ) -> None:
        needed = _spans(blobs)
        self._all: list[Segment] = []
        self._firsts: dict[str, int] = {}
        self._begins: dict[str, list[int]] = {}
        for file in files:
            whole = hashed.get(file.path)
            spans = list(_cut(needed.get(file.path, ()), whole, file.size))
            self._firsts[file.path] = len(self._all)
            self._begins[file.path] = [begin for begin, _ in spans]
            for begin, end in spans:
                self._all.append(Segment(len(self._all), file, begin, end))

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Segment:  # type: ignore[override]  # never a slice
        return self._all[number]

    def numbers(self, need: Need) -> range:
        """Return the numbers of the segments that have some of the bytes."""
        if need.begin >= need.end:
            return range(0)
        begins, first = self._begins[need.path], self._firsts[need.path]
        begin = first + bisect_right(begins, need.begin) - 1
        return range(begin, first + bisect_right(begins, need.end - 1))


def needs_of(run: Run) -> Iterator[Need]:
    """Yield the bytes that a run is made from."""
    return chain.from_iterable(map(needed_by, run.steps))


def united(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, those that touch or overlap as one."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _spans(blobs: Iterable[PlannedBlob]) -> dict[str, set[Span]]:
    """Return by file what should not be cut: the bytes of a run, together if a segment holds them.

    Global scales are left out, which are found in all bytes of a tensor: a run waits for these.
    """
    found: dict[str, set[Span]] = {}
    for blob in blobs:
        for run in runs_of(blob):
            spans: dict[str, list[Span]] = {}
            for path, begin, end in needs_of(run):
                if begin < end:
                    spans.setdefault(path, []).append((begin, end))
            for path, several in spans.items():
                hull = (min(begin for begin, _ in several), max(end for _, end in several))
                is_one = hull[1] - hull[0] <= SEGMENT
                found.setdefault(path, set()).update([hull] if is_one else several)
    return found


def _cut(spans: Collection[Span], hashed: int | None, size: int) -> Iterator[Span]:
    """Yield the segments of a file of ``size`` bytes that has ``spans``.

    If it is ``hashed`` from an offset on, they are all bytes behind it.
    """
    at = end = hashed or 0
    ends = [] if hashed is None else [(size, size)]
    for begin, stop in chain(sorted(spans), ends):
        needed = (max(begin, end), stop)
        # Between the spans of a file that is hashed lie bytes that only the hash needs.
        for first, last in [needed] if hashed is None else [(end, begin), needed]:
            if last <= end:
                continue
            if at == end:
                at = first
            elif last - at > SEGMENT or first - end > _GAP:
                yield at, end
                at = first
            while last - at > SEGMENT:
                yield at, at + SEGMENT
                at += SEGMENT
            end = last
    if at < end:
        yield at, end
