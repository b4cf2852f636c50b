"""Recent values: what was asked for last stays in memory, within a limit."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T")
_LOCKS = 32


class Recent(Generic[_T]):
    """Values by key, the least recently used of which is dropped first. Safe to share by threads.

    A value that several threads ask for is made once, while the others wait. ``size``: of a value,
    in bytes. Kept are at most ``most`` values, and ``most_bytes`` of all together.
    """

    def __init__(self, size: Callable[[_T], int], *, most_bytes: int, most: int) -> None:
        self._size = size
        self._most_bytes = most_bytes
        self._most = most
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, _T] = OrderedDict()
        # Keys share these locks: values of two keys may wait for each other, which is rare.
        self._making = [threading.Lock() for _ in range(_LOCKS)]

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the value of that key, which ``make`` returns. Raises: as ``make``."""
        with self._making[hash(key) % _LOCKS]:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
            value = make()
            if self._size(value) <= self._most_bytes:
                with self._lock:
                    self._values[key] = value
                    self._trim()
            return value

    def __len__(self) -> int:
        return len(self._values)

    def _trim(self) -> None:
        nbytes = sum(map(self._size, self._values.values()))
        while nbytes > self._most_bytes or len(self._values) > self._most:
            nbytes -= self._size(self._values.popitem(last=False)[1])
