"""Going on: what a killed import had done is compared with the files that it left.

Everything is used up to the last segment of the log, if all bytes that were written until then are
there. If some are not, everything is used up to the segment before those.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blobstore import hashing
from blobstore.errors import NotFoundError
from blobstore.importer.planning.outputs import PlannedBlob
from blobstore.importer.streaming.agenda import Agenda, files_of_blob
from blobstore.importer.streaming.arriving import part_path
from blobstore.importer.streaming.held import HeldSum, held_path
from blobstore.importer.streaming.pieces import StreamedPiece
from blobstore.importer.streaming.segments import SourceSegments
from blobstore.importer.streaming.worklog import LoggedWork, PieceSum
from blobstore.io.durable import os_errors, write_back
from blobstore.io.ranges import FileReader
from blobstore.io.workers import results_of
from blobstore.names import Digest
from blobstore.store.ports import Finished, Unfinished

_READ = 2**20


def begun_path(folder: Path, number: int) -> Path:
    """Return the path of the plan's blob of that number, while it is written."""
    return folder / f"blob-{number}"


@dataclass(slots=True)
class BlobBegun:
    """What was done of one blob.

    ``made``: the pieces that are in its file. ``finished``: the blob, if it is whole. ``held``: for
    each segment that later pieces need bytes of, the last segment of these pieces. ``lost``: the
    first segment whose bytes are lost, None if all are there.
    """

    number: int
    made: list[StreamedPiece] = field(default_factory=list)
    finished: Finished | None = None
    held: dict[int, int] = field(default_factory=dict)
    lost: int | None = None


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What of the work was done before.

    ``agenda``: of what is left. ``blobs``: those that were begun. ``states``: of the hashes of the
    files in the middle of which the work goes on, by path, and how many bytes each has hashed.
    """

    agenda: Agenda
    logged: LoggedWork
    blobs: tuple[BlobBegun, ...] = ()

    @property
    def states(self) -> dict[str, tuple[bytes, int]]:
        """The state of each file's hash, by its path, and how many bytes it has hashed."""
        segments = ((self.agenda.segments[one.number], one.state) for one in self.logged.segments)
        return {
            segment.file.path: (state, segment.end)
            for segment, state in segments
            if state is not None
        }

    @property
    def arrived(self) -> dict[int, int]:
        """How many bytes came of segments that are not done, by their numbers."""
        segments = self.agenda.segments
        return {
            number: parts[-1][1] - segments[number].begin
            for number, parts in self.logged.arrived.items()
        }


def find_done(
    folder: Path,
    logged: LoggedWork,
    blobs: Mapping[int, PlannedBlob],
    segments: SourceSegments,
    unfinished: Unfinished,
    jobs: int,
) -> WorkDone:
    """Return what was done of ``blobs``, by number, by the log and files in ``folder``.

    Raises: StorageError.
    """
    taken: dict[int, Finished] = {}
    while True:
        agenda = Agenda(blobs, segments, logged.begun)
        files = _Files(folder, agenda, logged, blobs, unfinished, taken)
        found = results_of(agenda.begun_blobs(), files.check, jobs, name="check")
        lost = [one.lost for one in found if one.lost is not None]
        if not lost:
            logged.arrived = _good_parts(folder, logged, agenda)
            return WorkDone(agenda, logged, tuple(found))
        logged = logged.before(min(lost))


def _good_parts(folder: Path, logged: LoggedWork, agenda: Agenda) -> dict[int, list[HeldSum]]:
    """Return what came of segments that are not done, as far as it is in their files."""
    good: dict[int, list[HeldSum]] = {}
    for number, parts in logged.arrived.items():
        if not agenda.begun <= number < agenda.segments.count:
            continue
        segment, path = agenda.segments[number], part_path(folder, number)
        at = segment.begin
        for part in parts:
            begin, end, _ = part
            if begin != at or end > segment.end or not _is_held(path, segment.begin, part):
                break
            good.setdefault(number, []).append(part)
            at = end
    return good


class _Files:
    """The files of a folder of unfinished work, and what its log says of them."""

    def __init__(
        self,
        folder: Path,
        agenda: Agenda,
        logged: LoggedWork,
        blobs: Mapping[int, PlannedBlob],
        unfinished: Unfinished,
        taken: dict[int, Finished],
    ) -> None:
        self._folder = folder
        self._agenda = agenda
        self._accepted = logged.accepted
        self._blobs = blobs
        self._unfinished = unfinished
        self._taken = taken
        done = logged.segments
        self._sums = {(one.number, one.begin): one for line in done for one in line.pieces}
        self._small = {number: digest for line in done for number, digest in line.small}
        self._held = {line.number: line.held for line in done}
        self._hashed = {line.number for line in done if line.state is not None}
        self._good_held: dict[tuple[int, HeldSum], bool] = {}

    def check(self, number: int) -> BlobBegun:
        """Return what was done of a blob. Raises: StorageError."""
        pieces = list(self._agenda.pieces(number))
        begun = self._agenda.begun
        found = BlobBegun(number, [piece for piece in pieces if piece.last < begun])
        lost = set(self._lost_held(found, [piece for piece in pieces if piece.last >= begun]))
        lost.update(self._lost_files(self._blobs[number]))
        if (digest := self._finished_digest(found, len(pieces))) is not None:
            found.finished = self._take(number, digest)
        if found.finished is None and found.made:
            lost.update(self._lost_pieces(found))
        found.lost = min(lost, default=None)
        return found

    def _lost_held(self, found: BlobBegun, later: Iterable[StreamedPiece]) -> Iterable[int]:
        """Yield the segments of which later pieces need bytes that are lost."""
        segments = self._agenda.segments
        for piece in later:
            for number in piece.segments:
                if number >= self._agenda.begun:
                    break
                found.held[number] = max(piece.last, found.held.get(number, 0))
                there = self._held.get(number, ())
                needed = piece.spans_in(segments, number)
                used = [one for one in there if any(_overlap(one, span) for span in needed)]
                is_logged = all(_is_within(span, used) for span in needed)
                if not is_logged or not all(self._is_held(number, one) for one in used):
                    yield number

    def _lost_files(self, blob: PlannedBlob) -> Iterable[int]:
        """Yield the first segment of each file that should have been hashed, and was not."""
        for file in files_of_blob(blob):
            numbers = self._agenda.segments.of_file(file.path)
            passed = bisect_left(numbers, self._agenda.begun)
            is_hashed = file.path in self._agenda.segments.hashed
            if is_hashed and passed and numbers[passed - 1] not in self._hashed:
                yield numbers[0]

    def _is_held(self, number: int, one: HeldSum) -> bool:
        """Return True if the bytes of a segment that were held are still those of the log."""
        is_good = self._good_held.get((number, one))
        if is_good is None:
            path, origin = held_path(self._folder, number), self._agenda.segments[number].begin
            is_good = self._good_held[number, one] = _is_held(path, origin, one)
        return is_good

    def _finished_digest(self, found: BlobBegun, pieces: int) -> Digest | None:
        """Return the digest of the file that a blob is, if it was given that name."""
        if len(found.made) < pieces:
            return None
        if found.made[0].is_small:
            return self._small.get(found.number)
        is_trusted = self._agenda.trusted_at(found.number) < self._agenda.begun
        is_there = begun_path(self._folder, found.number).exists()
        is_accepted = (is_trusted or self._unfinished.accepts_early) and not is_there
        return self._accepted.get(found.number) if is_accepted else None

    def _take(self, number: int, digest: Digest) -> Finished | None:
        if number not in self._taken:
            blob = self._unfinished.take(digest, self._blobs[number].size)
            if blob is None:
                return None
            self._taken[number] = blob
        return self._taken[number]

    def _lost_pieces(self, found: BlobBegun) -> Iterable[int]:
        """Yield the segments of pieces whose bytes are lost."""
        path = begun_path(self._folder, found.number)
        try:
            with FileReader(path, follow=False) as reader, os_errors("write back", path):
                # The page cache may show bytes whose writing has failed.
                write_back(reader.fileno())
                for piece in found.made:
                    one = self._sums.get((piece.number, piece.run.begin))
                    if piece.is_small or one is None or not _is_good(reader, piece, one):
                        yield piece.last
        except NotFoundError:
            yield from (piece.last for piece in found.made)


def _is_good(reader: FileReader, piece: StreamedPiece, one: PieceSum) -> bool:
    """Return True if a piece is in the file with the checksum of the log."""
    parts = [(one.begin, one.end - one.begin), *one.beside]
    is_inside = all(at >= 0 and at + nbytes <= reader.size for at, nbytes in parts)
    return one.end == piece.run.end and is_inside and _crc(reader, parts) == one.crc


def _is_held(path: Path, origin: int, one: HeldSum) -> bool:
    """Return True if a file of held bytes has those of the log; it begins with byte ``origin``."""
    begin, end, crc = one
    try:
        with FileReader(path, follow=False) as reader, os_errors("write back", path):
            write_back(reader.fileno())
            is_inside = origin <= begin and end - origin <= reader.size
            return is_inside and _crc(reader, [(begin - origin, end - begin)]) == crc
    except NotFoundError:
        return False


def _crc(reader: FileReader, parts: Iterable[tuple[int, int]]) -> int:
    crc = 0
    for at, nbytes in parts:
        for start in range(at, at + nbytes, _READ):
            crc = hashing.crc32([reader.read(start, min(_READ, at + nbytes - start))], crc)
    return crc


def _overlap(one: HeldSum, span: tuple[int, int]) -> bool:
    return one[0] < span[1] and span[0] < one[1]


def _is_within(span: tuple[int, int], sums: Sequence[HeldSum]) -> bool:
    return any(begin <= span[0] and span[1] <= end for begin, end, _ in sums)
