"""Buffers: the memory that an import works in, taken once and given back."""

from __future__ import annotations

import mmap
from contextlib import suppress
from queue import Empty, LifoQueue

from blobstore.io.durable import PAGE

SPARE_THREADS = 3
"""More threads than asked for, so that cores have work while threads wait for the disk."""


class Buffer:
    """Memory for one run of up to ``nbytes``, aligned for writes that bypass the page cache."""

    def __init__(self, pool: BufferPool, nbytes: int) -> None:
        self._pool = pool
        self._memory = mmap.mmap(-1, nbytes + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def at(self, offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of it; the address and ``offset`` are equal modulo the page size."""
        start = offset % PAGE
        return memoryview(self._memory)[start : start + nbytes]

    def part(self, begin: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of it from byte ``begin`` on."""
        return memoryview(self._memory)[begin : begin + nbytes]

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        self._pool.take_back(self)


class BufferPool:
    """``count`` buffers of ``nbytes`` each."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._free: LifoQueue[Buffer] = LifoQueue()
        self._taken: set[Buffer] = set()
        for _ in range(count):
            self._free.put(Buffer(self, nbytes))

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
        """Free the memory at once: buffers and pool refer to each other."""
        self._free = LifoQueue()
        self._taken.clear()

    def take_back(self, buffer: Buffer) -> None:
        """Make a buffer free that was taken."""
        with suppress(KeyError):  # it was given back before
            self._taken.remove(buffer)
            self._free.put(buffer)
