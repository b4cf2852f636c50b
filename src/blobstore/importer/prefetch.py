"""Prefetch: segments are fetched ahead, in their order, into a bounded number of buffers.

Threads read the bytes of segments, and of samples, as they read files on a disk.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np

from blobstore.importer.buffers import Buffer, BufferPool
from blobstore.importer.segments import Segment, Segments
from blobstore.io.ranges import SourceReader
from blobstore.io.workers import each, start_thread
from blobstore.source.fetching import Fetcher
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


_WAIT_S = 0.02
"""How long a thread waits before it checks again whether it is of use elsewhere."""


class LoadedSegment:
    """A segment in memory, which is given back when its last user has released it."""

    def __init__(self, segment: Segment, buffer: Buffer) -> None:
        self.segment = segment
        self.data = buffer.at(segment.begin, segment.nbytes)
        self._buffer = buffer
        self._users = 1
        self._mutex = threading.Lock()

    def use(self) -> None:
        """Count one more user."""
        with self._mutex:
            self._users += 1

    def release(self) -> None:
        """Count one user less."""
        with self._mutex:
            self._users -= 1
            is_free = not self._users
        if is_free:
            self._buffer.release()


class Prefetch:
    """Fetches ``segments``, as many at once as have buffers."""

    def __init__(
        self, segments: Segments, fetcher: Fetcher, buffers: BufferPool, jobs: int
    ) -> None:
        self._segments = segments
        self._fetcher = fetcher
        self._buffers = buffers
        self._jobs = jobs
        self._arrived: dict[int, LoadedSegment] = {}
        self._changed = threading.Condition()
        self._ends = threading.Event()
        self._error: BaseException | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Fetch within the block; at its end requests are cancelled."""
        thread = threading.Thread(target=self._run, name="prefetch")
        start_thread(thread)
        try:
            yield
        finally:
            self._ends.set()
            self._fetcher.cancel()
            thread.join()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            each(self._begun(), self._fetch, self._jobs, name="fetch", stop=self._ends)
        except BaseException as raised:  # noqa: BLE001  # `get` raises it
            error = raised
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _begun(self) -> Iterator[LoadedSegment]:
        for segment in self._segments:
            buffer = self._buffers.take(self._ends)
            if buffer is None:
                return
            yield LoadedSegment(segment, buffer)

    def _fetch(self, loaded: LoadedSegment) -> None:
        self._fetcher.fill(loaded.segment.file, loaded.segment.begin, loaded.data)
        with self._changed:
            self._arrived[loaded.segment.number] = loaded
            self._changed.notify_all()

    def get(self, number: int, *, waits: bool) -> LoadedSegment | None:
        """Return a segment, or None if it is not there, after a moment if the call ``waits``.

        Raises: as `Fetcher.fill`, the error of the first segment that fails.
        """
        with self._changed:
            if waits and number not in self._arrived and self._error is None:
                self._changed.wait(_WAIT_S)
            if number in self._arrived:
                return self._arrived.pop(number)
            if self._error is not None:
                raise self._error
        return None
