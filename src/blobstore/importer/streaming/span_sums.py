"""Sums: the digests of parts of files, of which two machines read the same bytes.

In an import by many machines one of them reads a file whole, and checks its declared digest.
Another one may need a part of it. Both find the digest of that part as it passes, and the commit
compares them. So every byte is covered by the declared digest, though one machine reads the file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from blobstore.hashing import Sha256
from blobstore.importer.streaming.needs import Need
from blobstore.importer.streaming.segments import SourceSegment
from blobstore.importer.streaming.worklog import SegmentDone, SpanSum
from blobstore.names import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceChecks:
    """How the files of a source are checked whose server declares a digest.

    ``whole``: the paths of those that are fetched whole, and hashed; None: all. ``spans``: what
    digests are found of, besides; then a blob that is made of other files is found by its digest
    only, not by later imports.
    """

    whole: frozenset[str] | None = None
    spans: tuple[Need, ...] = ()


class SpanSums:
    """The digests of ``spans``, found from segments in their order.

    ``logged``: the segments that an earlier run had done, and what its log says of them.
    """

    def __init__(
        self,
        spans: Iterable[Need],
        logged: Iterable[tuple[SourceSegment, SegmentDone]] = (),
    ) -> None:
        self.digests: dict[tuple[str, int, int], Digest] = {}
        self._spans: dict[str, list[Need]] = defaultdict(list)
        self._begun: dict[Need, Sha256] = {}
        for span in spans:
            self._spans[span.path].append(span)
        for segment, done in logged:
            for one in done.sums:
                span = Need(segment.file.path, one.begin, one.end)
                if one.is_whole:
                    self.digests[span] = Digest(one.state.hex())
                else:
                    self._begun[span] = Sha256.resumed(one.state)

    def add(self, segment: SourceSegment, data: memoryview) -> tuple[SpanSum, ...]:
        """Hash what a segment has of the spans; return how far each of them is then."""
        found = []
        for span in self._spans.get(segment.file.path, ()):
            begin, end = max(span.begin, segment.begin), min(span.end, segment.end)
            if begin >= end:
                continue
            stream = Sha256() if begin == span.begin else self._begun.pop(span)
            stream.update(data[begin - segment.begin : end - segment.begin])
            is_whole = end == span.end
            if is_whole:
                self.digests[span] = Digest(stream.digest().hex())
            else:
                self._begun[span] = stream
            state = stream.digest() if is_whole else stream.state()
            found.append(SpanSum(span.begin, span.end, state, is_whole))
        return tuple(found)
