"""Fetching: source files on servers read in large ranges, many at once.

A `Fetcher` bounds the requests at once and their rate; each range is one call of `Folder.fill`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.errors import UsageError
from blobstore.io.budget import Cancellation

if TYPE_CHECKING:
    from blobstore.source.weights import SourceFile

CONNECTIONS = 8
"""Requests at once: they bring 1 GB/s where a connection brings 125 MB/s."""
SLOWEST_LIMIT = 16 * 2**10
_LEAST_PIECE = 64 * 2**10
_BURST_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """How files are fetched.

    ``connections``: requests at once; None is `CONNECTIONS`. ``limit_rate``: bytes a second of all
    connections together; None is as many as come. Raises: UsageError for less than one of either,
    or a rate with which no request would end in time.
    """

    connections: int | None = None
    limit_rate: int | None = None

    def __post_init__(self) -> None:
        limits = (
            ("connections", self.connections, 1),
            ("limit_rate", self.limit_rate, SLOWEST_LIMIT),
        )
        for name, value, least in limits:
            if value is not None and value < least:
                raise UsageError(f"{name} is at least {least:,}, not {value:,}")


class Fetcher:
    """Fills memory with ranges of source files, several at once. Safe to share between threads.

    ``at_once``: how many ranges are fetched at once; more threads are of no use.
    """

    def __init__(self, options: FetchOptions) -> None:
        self.at_once = options.connections or CONNECTIONS
        self._slots = threading.Semaphore(self.at_once)
        self._cancellation = Cancellation()
        rate = options.limit_rate
        self._limit = RateLimit(rate, wait=self._cancellation.sleep) if rate is not None else None

    def fill(self, file: SourceFile, begin: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a file from byte ``begin`` on.

        The call waits until one more request may run. At a limited rate each request is for a part
        of a second. Raises: CorruptDataError when the file has another identity now; NotFoundError;
        ShortReadError; RemoteError; StorageError.
        """
        step = len(buffer) if self._limit is None else max(_LEAST_PIECE, self._limit.rate // 4)
        for at in range(0, len(buffer), step):
            piece = buffer[at : at + step]
            with self._slots:
                if self._limit is not None:
                    self._limit.take(len(piece))
                self._cancellation.check(file.path)
                file.folder.fill(file.name, file.identity, begin + at, piece, self._cancellation)

    def cancel(self) -> None:
        """End all requests, from any thread: calls of `fill` raise RemoteError soon."""
        self._cancellation.cancel()


class RateLimit:
    """A token bucket. Safe to share between threads.

    ``rate``: bytes a second. ``wait`` waits for so many seconds, or less.
    """

    def __init__(
        self,
        rate: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self.rate = rate
        self._clock = clock
        self._wait = wait
        self._paid_until = clock()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """Wait until so many bytes are allowed."""
        with self._lock:
            now = self._clock()
            start = max(self._paid_until, now - _BURST_S)
            self._paid_until = start + nbytes / self.rate
            left = self._paid_until - now
        if left > 0:
            self._wait(left)


@contextmanager
def fetching(files: Iterable[SourceFile], options: FetchOptions) -> Iterator[Fetcher]:
    """Give a fetcher of these files, which is cancelled at the end of the block."""
    fetcher = Fetcher(options)
    for file in files:
        file.folder.allow(fetcher.at_once)
    try:
        yield fetcher
    finally:
        fetcher.cancel()
