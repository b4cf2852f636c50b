"""Prefetch: segments are fetched ahead, in their order, into a bounded number of buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from blobstore.importer.buffers import Buffer, BufferPool
from blobstore.importer.segments import Segment, Segments
from blobstore.io.workers import each, start_thread
from blobstore.source.fetching import Fetcher

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
