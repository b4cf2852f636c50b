"""Buffers: the memory that an import works in, taken once and given back."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from queue import Empty, LifoQueue

from blobstore.io.durable import PAGE

SPARE_THREADS = 3
"""More threads than asked for, so that cores have work while threads wait for the disk."""


def _fresh(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class SpareMemory:
    """The memory of a closed pool, which the next one takes. Safe to share between threads.

    A process that makes many small portions of a plan needs it. With 16 buffers of 1 MiB, fresh
    memory cost about 10 ms a portion: 4 in page faults, 6 in freeing it (71 portions of 29 MB, a
    busy machine).
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._nbytes = 0
        self._memory: list[mmap.mmap] = []

    def take(self, count: int, nbytes: int) -> list[mmap.mmap]:
        """Return memory for ``count`` buffers. What is left, or of another size, is freed."""
        with self._mutex:
            found = self._memory[:count] if nbytes == self._nbytes else []
            self._memory = []
        return [*found, *(_fresh(nbytes) for _ in range(count - len(found)))]

    def keep(self, memory: list[mmap.mmap], nbytes: int) -> None:
        """Keep the memory of buffers that nothing uses any more, in the place of what is kept."""
        with self._mutex:
            self._nbytes, self._memory = nbytes, memory


class Buffer:
    """Memory for one run, aligned for writes that bypass the page cache."""

    def __init__(self, pool: BufferPool, memory: mmap.mmap) -> None:
        self._pool = pool
        self._memory = memory

    def at(self, offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of it; the address and ``offset`` are equal modulo the page size."""
        start = offset % PAGE
        return memoryview(self._memory)[start : start + nbytes]

    def part(self, begin: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of it from byte ``begin`` on."""
        return memoryview(self._memory)[begin : begin + nbytes]

    @property
    def memory(self) -> mmap.mmap:
        """All of it, and a page more."""
        return self._memory

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        self._pool.take_back(self)


class BufferPool:
    """``count`` buffers of ``nbytes`` each, in the memory of ``spare`` if it is given."""

    def __init__(self, count: int, nbytes: int, spare: SpareMemory | None = None) -> None:
        self._free: LifoQueue[Buffer] = LifoQueue()
        self._taken: set[Buffer] = set()
        self._nbytes = nbytes
        self._spare = spare or SpareMemory()
        for memory in self._spare.take(count, nbytes):
            self._free.put(Buffer(self, memory))

    def take(self) -> Buffer:
        """Return a free buffer, when there is one."""
        buffer = self._free.get()
        self._taken.add(buffer)
        return buffer

    def try_take(self, timeout_s: float = 0) -> Buffer | None:
        """Return a free buffer, or None if none becomes free in so many seconds."""
        try:
            buffer = self._free.get(timeout_s > 0, timeout_s)
        except Empty:
            return None
        self._taken.add(buffer)
        return buffer

    @property
    def is_empty(self) -> bool:
        """True if no buffer is free."""
        return self._free.empty()

    def close(self) -> None:
        """Free the memory at once: buffers and pool refer to each other.

        What was given back is kept in ``spare``.
        """
        free = []
        while (buffer := self.try_take()) is not None:
            free.append(buffer.memory)
        self._spare.keep(free, self._nbytes)
        self._free = LifoQueue()
        self._taken.clear()

    def take_back(self, buffer: Buffer) -> None:
        """Make a buffer free that was taken."""
        with suppress(KeyError):  # it was given back before
            self._taken.remove(buffer)
            self._free.put(buffer)
