"""Recent values: what was asked for last stays in memory, within a limit."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Recent(Generic[_T]):
    """Values by key, the least recently used of which is dropped first.

    A value that several threads ask for is made once, while the others wait. ``size``: of a value,
    in bytes. Kept are at most ``most`` values, and ``most_bytes`` of all together.
    """

    def __init__(self, size: Callable[[_T], int], *, most_bytes: int, most: int) -> None:
        self._size = size
        self._most_bytes = most_bytes
        self._most = most
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, _T] = OrderedDict()
        self._nbytes = 0
        self._making: dict[Hashable, tuple[threading.Lock, int]] = {}

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the value of that key, which ``make`` returns. Raises: as ``make``."""
        if (found := self._found(key)) is not None:
            return found
        with self._alone(key):
            if (found := self._found(key)) is not None:
                return found
            made = make()
            self._keep(key, made)
            return made

    def __len__(self) -> int:
        return len(self._values)

    @contextmanager
    def _alone(self, key: Hashable) -> Iterator[None]:
        with self._lock:
            lock, users = self._making.get(key, (threading.Lock(), 0))
            self._making[key] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, users = self._making.pop(key)
                if users > 1:
                    self._making[key] = (lock, users - 1)

    def _found(self, key: Hashable) -> _T | None:
        with self._lock:
            if (found := self._values.get(key)) is not None:
                self._values.move_to_end(key)
            return found

    def _keep(self, key: Hashable, value: _T) -> None:
        nbytes = self._size(value)
        if nbytes > self._most_bytes:
            return
        with self._lock:
            self._values[key] = value
            self._nbytes += nbytes
            while self._nbytes > self._most_bytes or len(self._values) > self._most:
                _, dropped = self._values.popitem(last=False)
                self._nbytes -= self._size(dropped)
