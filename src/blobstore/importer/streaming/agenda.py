"""The agenda of a streamed import: which segments are fetched, and what is made with each. Pure.

The segments of a plan are used in one order. What was done before is everything up to one of them:
`Agenda` begins behind it. The pieces of a blob are listed when its first segment is next, so only
those of a few blobs are known at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from blobstore.importer.planning.outputs import PlannedBlob
from blobstore.importer.streaming.pieces import (
    StreamedPiece,
    first_segment,
    last_segment,
    pieces_of,
)
from blobstore.importer.streaming.segments import SourceSegment, SourceSegments, Span
from blobstore.source.weights import SourceFile


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """What is done with a segment when it has come: ``pieces`` are made with it.

    ``held``: the parts of it that later pieces need; ``held_until``: the last of their segments.
    """

    segment: SourceSegment
    pieces: tuple[StreamedPiece, ...]
    held: tuple[Span, ...]
    held_until: int

    @property
    def number(self) -> int:
        """The segment's number."""
        return self.segment.number


class Agenda:
    """What is left to do of ``blobs`` (by number) behind the first ``begun`` segments."""

    def __init__(
        self, blobs: Mapping[int, PlannedBlob], segments: SourceSegments, begun: int = 0
    ) -> None:
        self.segments = segments
        self.begun = begun
        self._blobs = blobs
        self._opens: dict[int, list[int]] = defaultdict(list)
        self._hashed: set[str] = set()
        for number, blob in blobs.items():
            self._opens[max(begun, first_segment(blob, segments))].append(number)
            for file in files_of_blob(blob):
                if file.path in segments.hashed:
                    self._hashed.add(file.path)

    @property
    def numbers(self) -> Iterable[int]:
        """The numbers of the blobs."""
        return self._blobs

    def pieces(self, number: int) -> Iterator[StreamedPiece]:
        """Yield the pieces of a blob."""
        return pieces_of(number, self._blobs[number], self.segments)

    def begun_blobs(self) -> list[int]:
        """Return the numbers of the blobs that may have pieces which were made before."""
        return [
            number
            for number in self._opens[self.begun]
            if first_segment(self._blobs[number], self.segments) < self.begun
        ]

    def trusted_at(self, number: int) -> int:
        """Return the segment with which a blob may be used: the last of its pieces and files.

        The bytes of a file that is hashed are not trusted before its last segment.
        """
        blob = self._blobs[number]
        ends = [
            self.segments.of_file(file.path)[-1]
            for file in files_of_blob(blob)
            if file.path in self.segments.hashed
        ]
        return max(last_segment(blob, self.segments), *ends, 0)

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the segments to fetch, in their order, and what is done with each."""
        pending: dict[int, list[StreamedPiece]] = defaultdict(list)
        held: dict[int, list[StreamedPiece]] = defaultdict(list)
        for number in range(self.begun, self.segments.count):
            for opened in self._opens.pop(number, ()):
                for piece in pieces_of(opened, self._blobs[opened], self.segments):
                    if piece.last >= self.begun:
                        pending[piece.last].append(piece)
                        for early in piece.segments[:-1]:
                            held[early].append(piece)
            pieces, waiting = pending.pop(number, []), held.pop(number, [])
            segment = self.segments[number]
            if pieces or waiting or segment.file.path in self._hashed:
                until = max((piece.last for piece in waiting), default=number)
                spans = (piece.spans_in(self.segments, number) for piece in waiting)
                yield Arrival(segment, tuple(pieces), united(chain(*spans)), until)


def files_of_blob(blob: PlannedBlob) -> Iterator[SourceFile]:
    """Yield the files that a blob is made from, each once."""
    files = {
        part.file.path: part.file
        for source in blob.sources
        for part in source.parts.values()
        if part.nbytes
    }
    yield from files.values()


def united(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return spans in order, those that touch or overlap as one."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return tuple(joined)
