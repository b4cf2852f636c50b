"""The log of a streamed import: what was done with each segment, for a run that goes on.

A line is written when everything of a segment, and of all before it, has been written: so the
lines say how far the import had come. Nothing in the log is trusted over the bytes. Each line has
a checksum, and reading ends at the first line that is torn or wrong. Each piece that was written
has a checksum too, with which its bytes are compared before another run uses them. So a power cut,
a lost write or a file that was changed costs time only.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from blobstore.importer.streaming.held import HeldSum
from blobstore.io.durable import open_or_create, os_errors, replace_file
from blobstore.io.ranges import close_quietly
from blobstore.names import Digest

_log = logging.getLogger("blobstore.importer.streaming")


@dataclass(frozen=True, slots=True)
class PieceSum:
    """The checksum of a piece that was written: of the plan's blob ``number``, from ``begin`` on.

    ``crc``: the CRC-32 of its bytes, and then of those ``beside`` it, as (offset, bytes).
    """

    number: int
    begin: int
    end: int
    crc: int
    beside: tuple[tuple[int, int], ...] = ()


class SpanSum(NamedTuple):
    """How far the hash of bytes ``begin`` to ``end`` of a file is with a segment.

    ``state``: their digest if the hash ``is_whole``, else what it is continued from.
    """

    begin: int
    end: int
    state: bytes
    is_whole: bool


@dataclass(frozen=True, slots=True)
class SegmentDone:
    """What was done with a segment.

    ``state``: of its file's hash at its end; None if the file is not hashed. ``small``: the blobs
    that were written whole, by number. ``sums``: of parts of the file.
    """

    number: int
    state: bytes | None = None
    pieces: tuple[PieceSum, ...] = ()
    held: tuple[HeldSum, ...] = ()
    small: tuple[tuple[int, Digest], ...] = ()
    sums: tuple[SpanSum, ...] = ()

    def encode(self) -> list[Any]:
        """Return the line's value."""
        state = None if self.state is None else self.state.hex()
        pieces = [[one.number, one.begin, one.end, one.crc, one.beside] for one in self.pieces]
        small = [[number, digest.hex] for number, digest in self.small]
        sums = [[one.begin, one.end, one.state.hex(), one.is_whole] for one in self.sums]
        return [self.number, state, pieces, self.held, small, sums]

    @classmethod
    def decode(cls, value: list[Any]) -> SegmentDone:
        """Return the parsed line. Raises: ValueError, TypeError for another value."""
        number, state, pieces, held, small, sums = value
        return cls(
            int(number),
            None if state is None else bytes.fromhex(state),
            tuple(
                PieceSum(number, begin, end, crc, tuple((at, size) for at, size in beside))
                for number, begin, end, crc, beside in pieces
            ),
            tuple((begin, end, crc) for begin, end, crc in held),
            tuple((number, Digest(text)) for number, text in small),
            tuple(
                SpanSum(begin, end, bytes.fromhex(text), whole) for begin, end, text, whole in sums
            ),
        )


@dataclass(slots=True)
class LoggedWork:
    """The contents of a log: segments in their order, and the digests of accepted blobs.

    ``arrived``: by segment, what had come of it and was written, part after part.
    """

    segments: list[SegmentDone] = field(default_factory=list)
    accepted: dict[int, Digest] = field(default_factory=dict)
    arrived: dict[int, list[HeldSum]] = field(default_factory=dict)

    @property
    def begun(self) -> int:
        """The number of the segment behind the last one."""
        return self.segments[-1].number + 1 if self.segments else 0

    def before(self, number: int) -> LoggedWork:
        """Return what was done before a segment."""
        segments = [one for one in self.segments if one.number < number]
        return LoggedWork(segments, self.accepted, self.arrived)


class WorkLog:
    """The log in a folder of unfinished work. Safe to share between threads."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "log"
        self._mutex = threading.Lock()
        with os_errors("open", self._path):
            self._fd = open_or_create(self._path)

    def read(self) -> LoggedWork:
        """Return its contents up to the first line that can't be read. Raises: StorageError."""
        work = LoggedWork()
        with os_errors("read", self._path), self._path.open("rb") as file:
            data = file.read()
        for value in _values(data):
            try:
                match value:
                    case ["accepted", int(number), str(text)]:
                        work.accepted[number] = Digest(text)
                    case ["arrived", int(number), int(begin), int(end), int(crc)]:
                        work.arrived.setdefault(number, []).append((begin, end, crc))
                    case _:
                        work.segments.append(SegmentDone.decode(value))
            except (ValueError, TypeError) as error:
                _log.info("%s: a line is not used: %s", self._path, error)
                break
        return work

    def begin_again(self, work: LoggedWork) -> None:
        """Write the log anew, in the place of the old one. Raises: StorageError."""
        accepted = (_accepted(number, digest) for number, digest in work.accepted.items())
        arrived = (_arrived(number, one) for number, all_ in work.arrived.items() for one in all_)
        segments = (done.encode() for done in work.segments)
        lines = map(_line, chain(accepted, arrived, segments))
        with self._mutex, os_errors("write", self._path):
            replace_file(self._path, b"".join(lines))
            old, self._fd = self._fd, open_or_create(self._path)
            close_quietly(old)

    def append(self, done: SegmentDone) -> None:
        """Note that a segment is done, and all before it. Raises: StorageError."""
        self._write(done.encode())

    def accepting(self, number: int, digest: Digest) -> None:
        """Note that the file of a blob will be that of its digest. Raises: StorageError."""
        self._write(_accepted(number, digest))

    def arriving(self, number: int, part: HeldSum) -> None:
        """Note that a part of a segment has come, and was written. Raises: StorageError."""
        self._write(_arrived(number, part))

    def _write(self, value: list[Any]) -> None:
        line = _line(value)
        with self._mutex, os_errors("write", self._path):
            os.lseek(self._fd, 0, os.SEEK_END)
            while line:
                line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        """Close it; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_quietly(fd)


def _accepted(number: int, digest: Digest) -> list[Any]:
    return ["accepted", number, digest.hex]


def _arrived(number: int, part: HeldSum) -> list[Any]:
    return ["arrived", number, *part]


def _line(value: list[Any]) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _values(data: bytes) -> Iterator[list[Any]]:
    """Yield the values of the lines, up to the first one that is torn or wrong."""
    for line in data.splitlines(keepends=True):
        checksum, _, text = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
            return
        yield json.loads(text)
