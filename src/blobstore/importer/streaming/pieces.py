"""Pieces: the runs of a blob, cut so that each needs as few segments as possible. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field

from blobstore.importer.making import RUN, Atom, Run, Step, atoms_of, run_of
from blobstore.importer.planning.outputs import ImportPlan, PlannedBlob
from blobstore.importer.schedule import is_large
from blobstore.importer.streaming.needs import Need, needed_by, whole
from blobstore.importer.streaming.segments import SegmentSizes, SourceSegments, Span, spans_of
from blobstore.source.weights import SourceFile

PIECE = 2 * RUN
"""Bytes of a piece at most. Each piece costs the interpreter's lock some ten times."""


@dataclass(frozen=True, slots=True)
class StreamedPiece:
    """A run of the plan's blob ``number``, and the segments that it is made from, in order.

    What is made from nothing, such as a long header, is made with the first segment of its blob.
    ``is_small``: it is a whole blob, which is written together with others.
    """

    number: int
    run: Run
    segments: tuple[int, ...]
    is_small: bool = False

    @property
    def last(self) -> int:
        """The segment with which it is made: the last one that it needs."""
        return self.segments[-1]

    def spans_in(self, segments: SourceSegments, number: int) -> list[Span]:
        """Return what it needs of one segment, as bytes of the file."""
        segment = segments[number]
        return [
            (max(need.begin, segment.begin), min(need.end, segment.end))
            for need in _needs(self.run.steps)
            if need.path == segment.file.path
            and need.begin < segment.end
            and need.end > segment.begin
        ]


def pieces_of(number: int, blob: PlannedBlob, segments: SourceSegments) -> Iterator[StreamedPiece]:
    """Yield the pieces of the plan's blob of that number, in the order of their bytes.

    With their gaps they cover it exactly once.
    """
    first = (first_segment(blob, segments),)
    if not is_large(blob.size):
        atoms = list(atoms_of(blob))
        needed = _segments([step for atom in atoms for step in atom.steps], segments)
        yield StreamedPiece(number, run_of(atoms, 0), needed or first, is_small=True)
        return
    joined = _Joined()
    for atom in atoms_of(blob):
        needed = _segments(atom.steps, segments)
        if not joined.takes(atom, needed):
            yield joined.piece(number, first)
            joined = _Joined(joined.end)
        joined.add(atom, needed)
    yield joined.piece(number, first)


@dataclass(slots=True)
class _Joined:
    """Consecutive atoms from ``begin`` on that need the same segments."""

    begin: int = 0
    atoms: list[Atom] = field(default_factory=list)
    segments: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        run = run_of(self.atoms, self.begin)
        return run.end + run.gap

    def takes(self, atom: Atom, segments: tuple[int, ...]) -> bool:
        if not self.atoms:
            return True
        is_same = not self.segments or not segments or segments == self.segments
        size = sum([one.nbytes for one in self.atoms]) + atom.nbytes
        return is_same and size <= PIECE and not self.atoms[-1].gap

    def add(self, atom: Atom, segments: tuple[int, ...]) -> None:
        self.atoms.append(atom)
        self.segments = self.segments or segments

    def piece(self, number: int, first: tuple[int, ...]) -> StreamedPiece:
        return StreamedPiece(number, run_of(self.atoms, self.begin), self.segments or first)


def bytes_needed_by(blob: PlannedBlob) -> Iterator[Need]:
    """Yield the bytes that a blob is made from."""
    return (need for atom in atoms_of(blob) for need in _needs(atom.steps))


def _needs(steps: Sequence[Step]) -> Iterator[Need]:
    return (need for step in steps for need in needed_by(step))


def _segments(steps: Sequence[Step], segments: SourceSegments) -> tuple[int, ...]:
    found: set[int] = set()
    for need in _needs(steps):
        found.update(segments.numbers(*need))
    return tuple(sorted(found))


def first_segment(blob: PlannedBlob, segments: SourceSegments) -> int:
    """Return the first segment that a blob has bytes of; 0 if it has none."""
    return min((numbers[0] for numbers in _numbers(blob, segments)), default=0)


def last_segment(blob: PlannedBlob, segments: SourceSegments) -> int:
    """Return the last segment that a blob has bytes of; 0 if it has none."""
    return max((numbers[-1] for numbers in _numbers(blob, segments)), default=0)


def _numbers(blob: PlannedBlob, segments: SourceSegments) -> Iterator[Sequence[int]]:
    for source in blob.sources:
        for part in source.parts.values():
            if part.nbytes:
                yield segments.numbers(*whole(part))


def files_of(plan: ImportPlan) -> dict[str, SourceFile]:
    """Return the files of a plan's tensors by path, in their order."""
    needed = {
        part.file.path
        for blob in plan.blobs
        for source in blob.sources
        for part in source.parts.values()
        if part.nbytes
    }
    files = (file for inventory in plan.inventories for file in inventory.files)
    return {file.path: file for file in files if file.path in needed}


def cut_files(plan: ImportPlan, sizes: SegmentSizes, hashed: AbstractSet[str]) -> SourceSegments:
    """Return the segments of the plan's files; those of the paths ``hashed`` are hashed whole."""
    files = files_of(plan)
    needs: Mapping[str, list[list[Span]]] = {path: [] for path in files}
    for blob in plan.blobs:
        whole_blob = not is_large(blob.size)
        several: list[Sequence[Step]] = [atom.steps for atom in atoms_of(blob)]
        if whole_blob:
            several = [[step for steps in several for step in steps]]
        for steps in several:
            spans: dict[str, list[Span]] = {}
            for path, begin, end in _needs(steps):
                if end > begin:
                    spans.setdefault(path, []).append((begin, end))
            for path, found in spans.items():
                needs[path].append(found)
    spans = {
        path: spans_of(needs[path], sizes, file.size, is_whole=path in hashed)
        for path, file in files.items()
    }
    return SourceSegments([(file, spans[path]) for path, file in files.items()], hashed)
