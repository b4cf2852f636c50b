"""Scratch: memory that threads of one job, and of the next, use again and again."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from blobstore.kernels.arrays import Array

ThreadMemory = dict[str, Array]
"""Memory of a thread, by its use."""


class Scratch(threading.local):
    """Memory that a thread uses again: fresh memory is slow where the allocator gives it back.

    A thread's memory is one of ``free``, if there is one, and is noted in ``taken``.
    """

    def __init__(self, free: list[ThreadMemory], taken: list[ThreadMemory]) -> None:
        self._memory: ThreadMemory
        try:
            self._memory = free.pop()
        except IndexError:
            self._memory = {}
        taken.append(self._memory)

    def array(self, use: str, count: int, kind: np.dtype[Any]) -> Array:
        """Return an uninitialized array of ``count`` elements: the same memory for each ``use``."""
        nbytes = count * kind.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.size < nbytes:
            memory = self._memory[use] = np.empty(nbytes, np.uint8)
        return memory[:nbytes].view(kind)
