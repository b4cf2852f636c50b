"""Files of a source as far as they have arrived: in memory, or held in files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from blobstore.importer.streaming.held import HeldBytes
from blobstore.importer.streaming.segments import SourceSegment, SourceSegments
from blobstore.io.ranges import SourceReader
from blobstore.source.weights import SourceFile


class ArrivedSegments:
    """The bytes that a thread can read while it makes the pieces of one segment.

    That segment is in memory; the bytes that they need of others are held.
    """

    def __init__(self, segments: SourceSegments, held: HeldBytes) -> None:
        self.segments = segments
        self.held = held
        self._here = threading.local()

    @contextmanager
    def using(self, number: int, data: memoryview) -> Iterator[None]:
        """Let this thread read the segment of that number, whose bytes are ``data``."""
        self._here.number, self._here.data = number, data
        try:
            yield
        finally:
            self._here.number, self._here.data = -1, memoryview(b"")

    def in_memory(self, number: int) -> memoryview | None:
        """Return the bytes of a segment if this thread uses it, else None."""
        data: memoryview = self._here.data
        return data if self._here.number == number else None

    def open(self, file: SourceFile) -> ArrivedFile:
        """Return a reader of what has arrived of a file."""
        return ArrivedFile(file, self)


class ArrivedFile(SourceReader):
    """A file of which only the bytes that have arrived can be read. See `ArrivedSegments`."""

    def __init__(self, file: SourceFile, arrived: ArrivedSegments) -> None:
        self.name = file.path
        self.size = file.size
        self.identity = file.identity
        self._arrived = arrived

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """See `OpenReader.view`: if all is in the segment that is used."""
        numbers = self._arrived.segments.numbers(self.name, offset, offset + nbytes)
        data = self._arrived.in_memory(numbers[0]) if len(numbers) == 1 else None
        if data is None:
            return None
        begin = offset - self._arrived.segments[numbers[0]].begin
        return data[begin : begin + nbytes]

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See `OpenReader.readinto`."""
        end = offset + len(buffer)
        for number in self._arrived.segments.numbers(self.name, offset, end):
            segment = self._arrived.segments[number]
            first, last = max(offset, segment.begin), min(end, segment.end)
            self._read_part(segment, first, buffer[first - offset : last - offset])

    def _read_part(self, segment: SourceSegment, offset: int, buffer: memoryview) -> None:
        data = self._arrived.in_memory(segment.number)
        if data is None:
            self._arrived.held.readinto(segment, offset, buffer)
            return
        begin = offset - segment.begin
        # NumPy copies without the interpreter's lock.
        to, origin = np.frombuffer(buffer, np.uint8), np.frombuffer(data, np.uint8)
        to[:] = origin[begin : begin + len(buffer)]

    def read(self, offset: int, length: int) -> bytes:
        """See `OpenReader.read`."""
        data = bytearray(length)
        self.readinto(offset, memoryview(data))
        return bytes(data)

    def check_unchanged(self) -> None:
        """Do nothing: each segment was checked when it was fetched."""
