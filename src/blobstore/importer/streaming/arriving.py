"""Bytes on their way: of small sources, what came of segments that are not done is kept in files.

A kill loses what is in memory. Of a large source that is 4 %, so nothing is kept there. Of a small
one it would be more: its bytes are also written to a file of their segment as they come, and the
log has their checksums. The file is removed when the segment is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from blobstore import hashing
from blobstore.importer.streaming.segments import SourceSegment
from blobstore.importer.streaming.worklog import WorkLog
from blobstore.io.durable import open_or_create, os_errors, write_all_at
from blobstore.io.ranges import FileReader, close_quietly
from blobstore.source.fetching import Fetcher


def part_path(folder: Path, number: int) -> Path:
    """Return the path of the file with the bytes that came of a segment."""
    return folder / f"part-{number}"


class ArrivingBytes:
    """Fetches segments. Safe to share between threads.

    ``step``: after so many bytes of a segment they are written. ``there``: how many bytes of a
    segment, by its number, are in its file from an earlier run.
    """

    def __init__(self, folder: Path, log: WorkLog, step: int, there: Mapping[int, int]) -> None:
        self._folder = folder
        self._log = log
        self._step = step
        self._there = there

    def fill(self, fetcher: Fetcher, segment: SourceSegment, data: memoryview) -> None:
        """Fill ``data`` with a segment, from its file as far as it came before.

        Raises: as `Fetcher.fill`.
        """
        path = part_path(self._folder, segment.number)
        with os_errors("write", path):
            fd = open_or_create(path)
        try:
            done = self._read(path, segment.number, data)
            arriving = _Arriving(fd, path, self._log, self._step, segment, data, done)
            if done < len(data):
                begin, rest = segment.begin + done, data[done:]
                fetcher.fill(segment.file.name, segment.file.identity, begin, rest, arriving.came)
                arriving.write()
        finally:
            close_quietly(fd)

    def _read(self, path: Path, number: int, data: memoryview) -> int:
        """Fill the begin of ``data``; return how many bytes that are."""
        done = self._there.get(number, 0)
        if done:
            with FileReader(path, follow=False) as reader:
                reader.readinto(0, data[:done])
        return done

    def done(self, number: int) -> None:
        """Remove what was kept of a segment."""
        with suppress(OSError):  # it goes with its folder
            part_path(self._folder, number).unlink()


class _Arriving:
    """A segment on its way: ``done`` of its bytes are in its file."""

    def __init__(
        self,
        fd: int,
        path: Path,
        log: WorkLog,
        step: int,
        segment: SourceSegment,
        data: memoryview,
        done: int,
    ) -> None:
        self._fd = fd
        self._path = path
        self._log = log
        self._step = step
        self._segment = segment
        self._data = data
        self._done = self._came = done

    def came(self, nbytes: int) -> None:
        self._came += nbytes
        if self._came - self._done >= self._step:
            self.write()

    def write(self) -> None:
        """Write what came to the file, and say so in the log."""
        part = self._data[self._done : self._came]
        if not part:
            return
        with os_errors("write", self._path):
            write_all_at(self._fd, self._done, part)
        begin = self._segment.begin
        self._log.arriving(
            self._segment.number, (begin + self._done, begin + self._came, hashing.crc32([part]))
        )
        self._done = self._came
