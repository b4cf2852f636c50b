"""Segments: parts of a source's files, in the order in which they are fetched. Pure.

A segment is fetched in one request, and is in memory while blobs are made of it. Files are fetched
one after the other, each from its beginning to its end, because its declared digest is that of all
its bytes. Files are cut between the bytes of runs, so most runs need one segment.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from blobstore.formats.quant import Quantization
from blobstore.importer.making import Copy, GlobalScale, Run, Step, Values, runs_of
from blobstore.importer.planning.outputs import OutputTensor, PlannedBlob
from blobstore.kernels.arrays import numpy_dtype
from blobstore.kernels.scales import BlockRun
from blobstore.source.weights import Form, SourceFile, SourceTensor, SourceWeight


class Need(NamedTuple):
    """Bytes of a file, by its path: from ``begin`` to ``end``. A plan may have a million."""

    path: str
    begin: int
    end: int


def needed_by(step: Step) -> Iterator[Need]:
    """Yield the bytes that a step is made from; nothing for known ones."""
    match step:
        case Copy(tensor, start, nbytes):
            yield _part(tensor, start, start + nbytes)
        case GlobalScale(output):
            yield from _global_scale(output)
        case Values(output, source, start, count):
            if output.global_scale is not None:
                yield from _global_scale(output)
            else:
                yield from needed_for(source, start, count)


def whole(tensor: SourceTensor) -> Need:
    """Return all bytes of a tensor."""
    return _part(tensor, 0, tensor.nbytes)


def _part(tensor: SourceTensor, begin: int, end: int) -> Need:
    return Need(tensor.file.path, tensor.offset + begin, tensor.offset + end)


def _global_scale(output: OutputTensor) -> Iterator[Need]:
    """Yield what a global scale is found in: the source's own, else all values."""
    for source in output.sources:
        if output.copies_codes:
            yield whole(source.companions[".global_scale"])
        else:
            yield from map(whole, source.parts.values())


def needed_for(source: SourceWeight, start: int, count: int) -> Iterator[Need]:
    """Yield the bytes that ``count`` values of a weight from index ``start`` on are read from."""
    match source.form:
        case Form.PLAIN:
            yield _plain(source, start, count)
        case Form.BLOCK_FP8:
            yield _part(source.tensor, start, start + count)
            *_, rows, cols = source.shape
            scales = BlockRun(rows=rows, cols=cols, first=start, count=count).scales
            yield _items(source.companions[".scale"], scales.start, scales.stop)
        case Form.CODES:
            if source.quantization is None:
                raise AssertionError("codes are quantized")
            yield from _codes(source, source.quantization, start, count)


def _plain(source: SourceWeight, start: int, count: int) -> Need:
    """Return the values; of a transposed weight its whole matrices, where columns are rows."""
    if source.transposed:
        one = math.prod(source.shape[-2:])
        start, end = start // one * one, -(-(start + count) // one) * one
    else:
        end = start + count
    return _items(source.tensor, start, end)


def _codes(
    source: SourceWeight, quantization: Quantization, start: int, count: int
) -> Iterator[Need]:
    for part in quantization.parts((count,), source.companions[".scale"].dtype):
        items = math.prod(part.shape)
        first, nbytes = start * items // count, numpy_dtype(part.dtype).itemsize
        yield _part(source.parts[part.suffix], first * nbytes, (first + items) * nbytes)
    if ".global_scale" in source.companions:
        yield whole(source.companions[".global_scale"])


def _items(tensor: SourceTensor, first: int, stop: int) -> Need:
    """Return elements of a tensor; those narrower than a byte are counted in bytes."""
    nbytes = max(1, tensor.dtype.bits // 8)
    return _part(tensor, first * nbytes, stop * nbytes)


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
