"""Buffers: the memory that an import works in, taken once and given back."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from queue import Empty, LifoQueue

from blobstore.io.durable import PAGE
from blobstore.source.scratch import ThreadMemory

SPARE_THREADS = 3
"""More threads than asked for, so that cores have work while threads wait for the disk."""


def _fresh(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class SpareMemory:
    """The memory of jobs that follow each other in a process. Safe to share between threads.

    Buffers that one job has given back are taken by the next, also before the first one has ended.
    ``scratch``: memory of threads that have ended. A process that makes many small portions of a
    plan needs it. With 16 buffers of 1 MiB, fresh memory cost about 10 ms a portion: 4 in page
    faults, 6 in freeing it (71 portions of 29 MB, a busy machine).
    """

    def __init__(self) -> None:
        self.scratch: list[ThreadMemory] = []
        self._mutex = threading.Lock()
        self._kind = (0, 0)
        self._count = 0
        self._free: LifoQueue[mmap.mmap] = LifoQueue()

    def buffers(self, count: int, nbytes: int, memory: int) -> LifoQueue[mmap.mmap]:
        """Return where buffers of ``nbytes`` are taken from, and given back: at least ``count``.

        Jobs that work in the same bytes of ``memory`` share them; for others all are fresh.
        """
        with self._mutex:
            if (nbytes, memory) != self._kind:
                self._kind, self._count, self._free = (nbytes, memory), 0, LifoQueue()
            while self._count < count:
                self._free.put(_fresh(nbytes))
                self._count += 1
            return self._free


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
    """``count`` buffers of ``nbytes`` each, or those of ``spare`` for jobs in that ``memory``."""

    def __init__(
        self, count: int, nbytes: int, spare: SpareMemory | None = None, memory: int = 0
    ) -> None:
        self._free = (spare or SpareMemory()).buffers(count, nbytes, memory)
        self._taken: set[Buffer] = set()

    def take(self) -> Buffer:
        """Return a free buffer, when there is one."""
        return self._take(self._free.get())

    def try_take(self, timeout_s: float = 0) -> Buffer | None:
        """Return a free buffer, or None if none becomes free in so many seconds."""
        try:
            return self._take(self._free.get(timeout_s > 0, timeout_s))
        except Empty:
            return None

    def _take(self, memory: mmap.mmap) -> Buffer:
        buffer = Buffer(self, memory)
        self._taken.add(buffer)
        return buffer

    @property
    def is_empty(self) -> bool:
        """True if no buffer is free."""
        return self._free.empty()

    def close(self) -> None:
        """Give all of them back, when no thread uses them any more.

        Without ``spare`` the memory is freed at once: buffers and pool refer to each other.
        """
        for buffer in list(self._taken):
            buffer.release()
        self._free = LifoQueue()

    def take_back(self, buffer: Buffer) -> None:
        """Make a buffer free that was taken."""
        with suppress(KeyError):  # it was given back before
            self._taken.remove(buffer)
            self._free.put(buffer.memory)
