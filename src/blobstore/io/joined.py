"""Several readers as one: the bytes of a file that is not written anywhere.

Parts are opened when they are read, one at a time. Reading in order opens each part once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from blobstore.errors import ShortReadError
from blobstore.io.ranges import OpenReader


@dataclass(frozen=True, slots=True)
class Segment:
    """``size`` bytes, which are those of the reader that ``open`` returns, from ``offset`` on."""

    size: int
    open: Callable[[], OpenReader]
    offset: int = 0


class JoinedReader(OpenReader):
    """The bytes of several parts, one after the other. Not safe to share between threads."""

    identity = None

    def __init__(self, name: str, parts: Sequence[Segment]) -> None:
        self.name = name
        self._parts = parts
        *self._begins, self.size = accumulate((part.size for part in parts), initial=0)
        self._current: tuple[int, OpenReader] | None = None

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See `OpenReader`. Raises: as the parts."""
        self._check(offset, len(buffer))
        while len(buffer):
            number = bisect_right(self._begins, offset) - 1  # the last: those before it are empty
            begin, part = self._begins[number], self._parts[number]
            length = min(len(buffer), begin + part.size - offset)
            reader = self._opened(number)
            reader.readinto(part.offset + offset - begin, buffer[:length])
            buffer, offset = buffer[length:], offset + length

    def read(self, offset: int, length: int) -> bytes:
        """See `OpenReader`."""
        self._check(offset, length)  # before the memory is taken
        data = bytearray(length)
        self.readinto(offset, memoryview(data))
        return bytes(data)

    def _check(self, offset: int, length: int) -> None:
        if offset + length > self.size:
            raise ShortReadError(
                f"{self.name} ends before byte {offset + length:,}", path=self.name
            )

    def _opened(self, number: int) -> OpenReader:
        if self._current is None or self._current[0] != number:
            self.close()
            self._current = number, self._parts[number].open()
        return self._current[1]

    def close(self) -> None:
        """Close the part that is open; a second call does nothing."""
        current, self._current = self._current, None
        if current is not None:
            current[1].close()


class MemoryReader(OpenReader):
    """A reader over a buffer, without a copy of it."""

    identity = None

    def __init__(self, data: memoryview, name: str) -> None:
        self.name = name
        self._data = data.cast("B")
        self.size = len(self._data)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See `OpenReader`. Raises: ShortReadError."""
        if offset + len(buffer) > self.size:
            raise ShortReadError(f"{self.name} ends before byte {offset + len(buffer):,}")
        buffer[:] = self._data[offset : offset + len(buffer)]

    def read(self, offset: int, length: int) -> bytes:
        """See `OpenReader`."""
        if offset + length > self.size:
            raise ShortReadError(f"{self.name} ends before byte {offset + length:,}")
        return bytes(self._data[offset : offset + length])
