"""Buffers: the memory that an import works in, taken once and given back. How many there are bounds an import's memory."""

from __future__ import annotations

import mmap
import threading

from blobstore.store.files import PAGE

# Page-aligned; and all there from the start: an import that begins does not run out of memory later.
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


class Buffer:
    """Memory for one run of up to ``nbytes``, placed so that it can be written around the page cache."""

    def __init__(self, pool: BufferPool, nbytes: int) -> None:
        self._pool = pool
        self._memory = mmap.mmap(-1, nbytes + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _POPULATE)

    def at(self, offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of it whose address has the same remainder by the page size as ``offset``."""
        start = offset % PAGE
        return memoryview(self._memory)[start : start + nbytes]

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        self._pool.take_back(self)


class BufferPool:
    """``count`` buffers of ``nbytes`` each."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._free = [Buffer(self, nbytes) for _ in range(count)]
        self._taken: set[Buffer] = set()
        self._changed = threading.Condition()

    def take(self) -> Buffer:
        """Return a free buffer, when there is one."""
        with self._changed:
            while not self._free:
                self._changed.wait()
            buffer = self._free.pop()
            self._taken.add(buffer)
            return buffer

    def take_back(self, buffer: Buffer) -> None:
        """Make a buffer free that was taken."""
        with self._changed:
            if buffer in self._taken:
                self._taken.remove(buffer)
                self._free.append(buffer)
                self._changed.notify()
