"""The memory of segments: one region, of which parts are taken in order and given back."""

from __future__ import annotations

import mmap
import threading
from collections import deque

from blobstore.io.durable import PAGE, os_errors


class RingPart:
    """Memory of one segment, from byte ``begin`` to ``end`` of the ring."""

    def __init__(self, begin: int, data: memoryview) -> None:
        self.begin = begin
        self.end = begin + len(data)
        self.data = data
        self.is_free = False


class Ring:
    """``nbytes`` of memory. Safe to share between threads.

    Parts are taken in the order in which they are used, and most are given back in that order, so
    what is free is in one piece. The memory is taken once: pages that are new for each segment
    would cost as much as hashing it.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises: StorageError when there is not so much memory."""
        with os_errors("take", f"{nbytes:,} bytes of memory"):
            memory = mmap.mmap(-1, nbytes + 2 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = memoryview(memory)
        self._taken: deque[RingPart] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def take(self, nbytes: int, offset: int) -> RingPart | None:
        """Return memory for bytes from ``offset`` of a file on, when there is some.

        Its address and ``offset`` are equal modulo the page size. None after `close`.
        """
        with self._changed:
            while True:
                if self._is_closed:
                    return None
                begin = self._place(nbytes, offset % PAGE)
                if begin is not None:
                    part = RingPart(begin, self._memory[begin : begin + nbytes])
                    self._taken.append(part)
                    return part
                self._changed.wait()

    def _place(self, nbytes: int, phase: int) -> int | None:
        size = len(self._memory)
        if not self._taken:
            return phase
        tail, head = self._taken[0].begin, self._taken[-1].end
        begin = head + (phase - head) % PAGE
        if head > tail:
            if begin + nbytes <= size:
                return begin
            begin = phase
        return begin if begin + nbytes < tail else None

    def give_back(self, part: RingPart) -> None:
        """Free the memory of a segment."""
        with self._changed:
            part.is_free = True
            while self._taken and self._taken[0].is_free:
                self._taken.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        """End the waiting for memory."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
