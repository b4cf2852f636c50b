"""Loaded bytes: what a thread has in memory of a source's files on servers."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np

from blobstore.io.ranges import SourceReader
from blobstore.source.weights import SourceFile

Parts: TypeAlias = Mapping[str, Sequence[tuple[int, memoryview]]]
"""Bytes by the path of their file: where they begin there, in order."""


def _begin(part: tuple[int, memoryview]) -> int:
    return part[0]


class LoadedBytes:
    """The bytes of files that each thread can read now. ``other`` reads what is not loaded."""

    def __init__(self, other: Callable[[SourceFile, int, memoryview], None]) -> None:
        self.other = other
        self._here = threading.local()

    @contextmanager
    def using(self, *parts: Parts) -> Iterator[None]:
        """Let this thread read parts of files within the block: those of the first that has one."""
        self._here.parts = parts
        try:
            yield
        finally:
            self._here.parts = ()

    def find(self, path: str, offset: int) -> memoryview | None:
        """Return the loaded bytes of a file from ``offset`` on, or None."""
        for parts in getattr(self._here, "parts", ()):
            several = parts.get(path, ())
            number = bisect_right(several, offset, key=_begin) - 1
            if number >= 0:
                begin, data = several[number]
                if offset - begin < len(data):
                    return data[offset - begin :]  # type: ignore[no-any-return]
        return None

    def open(self, file: SourceFile) -> LoadedFile:
        """Return a reader of a file."""
        return LoadedFile(file, self)


class LoadedFile(SourceReader):
    """A file of which the thread's loaded bytes are read. It was checked when they came."""

    def __init__(self, file: SourceFile, loaded: LoadedBytes) -> None:
        self.name = file.path
        self.size = file.size
        self.identity = file.identity
        self._file = file
        self._loaded = loaded

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """See `OpenReader`."""
        data = self._loaded.find(self.name, offset)
        return data[:nbytes] if data is not None and len(data) >= nbytes else None

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See `OpenReader`."""
        while buffer:
            data = self._loaded.find(self.name, offset)
            if data is None:
                self._loaded.other(self._file, offset, buffer)
                return
            count = min(len(data), len(buffer))
            # NumPy copies without the interpreter's lock.
            np.frombuffer(buffer, np.uint8)[:count] = np.frombuffer(data, np.uint8)[:count]
            buffer, offset = buffer[count:], offset + count

    def read(self, offset: int, length: int) -> bytes:
        """See `OpenReader`."""
        data = bytearray(length)
        self.readinto(offset, memoryview(data))
        return bytes(data)
