"""Held bytes: parts of segments that wait, in files, for the pieces that need other segments too.

Each segment has a file of its own, in which the bytes lie where they lie in the segment; the rest
of the file is a hole. The file is removed when the last piece has been made.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from blobstore import hashing
from blobstore.errors import CorruptDataError
from blobstore.importer.streaming.segments import SourceSegment, Span
from blobstore.io.durable import open_or_create, os_errors, write_all_at
from blobstore.io.ranges import close_quietly

HeldSum = tuple[int, int, int]
"""Begin and end of bytes in their file of the source, and their CRC-32."""


def held_path(folder: Path, number: int) -> Path:
    """Return the path of the file of a segment's bytes."""
    return folder / f"held-{number}"


class HeldBytes:
    """The held bytes of one import. Safe to share between threads.

    ``folder``: where the files lie, for an import that goes on; None for files without a name.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._fds: dict[int, int] = {}
        self._needed: dict[int, list[int]] = defaultdict(list)
        self._mutex = threading.Lock()

    def _path(self, number: int) -> Path:
        return held_path(self._folder or Path(tempfile.gettempdir()), number)

    def write(
        self, segment: SourceSegment, data: memoryview, spans: Sequence[Span]
    ) -> list[HeldSum]:
        """Write parts of a segment, whose bytes are ``data``. Raises: StorageError."""
        sums = []
        for begin, end in spans:
            part = data[begin - segment.begin : end - segment.begin]
            with os_errors("write", self._path(segment.number)):
                write_all_at(self._fd(segment.number), begin - segment.begin, part)
            sums.append((begin, end, hashing.crc32([part])))
        return sums

    def readinto(self, segment: SourceSegment, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``offset`` of the source's file on.

        Raises: CorruptDataError if the file of held bytes was cut; StorageError.
        """
        path = self._path(segment.number)
        at = offset - segment.begin
        with os_errors("read", path):
            fd = self._fd(segment.number)
            while buffer:
                count = os.preadv(fd, [buffer], at)
                if not count:
                    raise CorruptDataError(f"{path} ends at byte {at:,}", path=str(path))
                buffer, at = buffer[count:], at + count

    def keep(self, number: int, until: int) -> None:
        """Keep the bytes of a segment until everything of the segment ``until`` is done."""
        with self._mutex:
            self._needed[until].append(number)

    def done(self, number: int) -> None:
        """Remove held bytes that are not needed after a segment."""
        with self._mutex:
            unneeded = self._needed.pop(number, [])
            fds = [self._fds.pop(one) for one in unneeded if one in self._fds]
        for fd in fds:
            close_quietly(fd)
        for one in unneeded if self._folder is not None else ():
            with suppress(OSError):  # it goes with its folder
                self._path(one).unlink()

    def _fd(self, number: int) -> int:
        with self._mutex:
            fd = self._fds.get(number)
            if fd is None:
                fd = self._fds[number] = self._open(number)
            return fd

    def _open(self, number: int) -> int:
        if self._folder is not None:
            return open_or_create(self._path(number))
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        with self._mutex:
            fds, self._fds = list(self._fds.values()), {}
        for fd in fds:
            close_quietly(fd)
