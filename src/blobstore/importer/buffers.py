"""Buffers: the memory that an import works in, taken once and given back."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from queue import Empty, LifoQueue

from blobstore.io.durable import PAGE, os_errors

_WAIT_S = 0.02


class Buffer:
    """Memory for one run or segment, aligned for I/O that bypasses the page cache."""

    def __init__(self, pool: BufferPool, memory: mmap.mmap) -> None:
        self._pool = pool
        self.memory = memory

    def at(self, offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of it; the address and ``offset`` are equal modulo the page size."""
        start = offset % PAGE
        return memoryview(self.memory)[start : start + nbytes]

    def part(self, begin: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of it from byte ``begin`` on."""
        return memoryview(self.memory)[begin : begin + nbytes]

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        self._pool.take_back(self)


class BufferPool:
    """``count`` buffers of ``nbytes`` each. Safe to share between threads."""

    def __init__(self, count: int, nbytes: int) -> None:
        """Raises: StorageError when there is not so much memory."""
        self._free: LifoQueue[mmap.mmap] = LifoQueue()
        self._taken: set[Buffer] = set()
        with os_errors("take", f"{count * nbytes:,} bytes of memory"):
            for _ in range(count):
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                self._free.put(mmap.mmap(-1, nbytes + PAGE, flags))

    def take(self, stopped: threading.Event) -> Buffer | None:
        """Return a buffer when one is free; None when ``stopped`` is set before.

        After an error no buffer may become free any more.
        """
        while not stopped.is_set():
            with suppress(Empty):
                buffer = Buffer(self, self._free.get(timeout=_WAIT_S))
                self._taken.add(buffer)
                return buffer
        return None

    @property
    def is_empty(self) -> bool:
        """True if no buffer is free."""
        return self._free.empty()

    def take_back(self, buffer: Buffer) -> None:
        """Make a buffer free that was taken."""
        with suppress(KeyError):  # it was given back before
            self._taken.remove(buffer)
            self._free.put(buffer.memory)

    def close(self) -> None:
        """Free the memory when no thread uses it any more: buffers and pool refer to each other."""
        self._taken.clear()
        self._free = LifoQueue()
