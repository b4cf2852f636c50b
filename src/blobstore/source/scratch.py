"""Scratch: memory that the threads of one job use again and again."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from blobstore.kernels.arrays import Array


class Scratch(threading.local):
    """Memory that a thread uses again: fresh memory is slow where the allocator gives it back."""

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}  # by its use; called in each thread

    def array(self, use: str, count: int, kind: np.dtype[Any]) -> Array:
        """Return an uninitialized array of ``count`` elements: the same memory for each ``use``."""
        nbytes = count * kind.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.size < nbytes:
            memory = self._memory[use] = np.empty(nbytes, np.uint8)
        return memory[:nbytes].view(kind)
