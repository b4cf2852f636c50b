"""Fetching: the files of one folder read in large ranges, many at once.

An import of files on servers (importer/far.py) asks their folder for a `Fetcher`. `RemoteFetcher`
is that of folders on servers and in buckets: it bounds the requests at once, and their rate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from blobstore.errors import UsageError
from blobstore.io.budget import Cancellation

if TYPE_CHECKING:
    from blobstore.io.ranges import Identity
    from blobstore.source.folders import Folder
    from blobstore.source.weights import SourceFile

CONNECTIONS = 8
"""Requests at once: they bring 1 GB/s where a connection brings 125 MB/s."""
SLOWEST_LIMIT = 16 * 2**10
_LEAST_PIECE = 64 * 2**10
_BURST_S = 0.25

ReadRange = Callable[[str, "Identity", int, memoryview, Cancellation], None]
"""Fills memory with the bytes of a file from a byte on, with one request where nothing breaks."""


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
        for name, value in (("connections", self.connections), ("limit_rate", self.limit_rate)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is at least 1, not {value}")


class Fetcher(Protocol):
    """Fills memory with ranges of a folder's files. Safe to share between threads."""

    @property
    def at_once(self) -> int:
        """How many ranges are fetched at once: more threads are of no use."""

    def fill(self, name: str, identity: Identity, begin: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a file from byte ``begin`` on.

        The call waits until one more request may run. Raises: CorruptDataError when the file has
        another identity now; NotFoundError; ShortReadError; RemoteError; StorageError.
        """

    def cancel(self) -> None:
        """End all requests, from any thread: calls of `fill` raise RemoteError soon."""


class FolderFetcher:
    """Reads ranges through a folder's own readers, one after the other. See `Fetcher`."""

    at_once = 1

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def fill(self, name: str, identity: Identity, begin: int, buffer: memoryview) -> None:
        """See `Fetcher`."""
        with self._folder.open(name, identity) as reader:
            reader.readinto(begin, buffer)

    def cancel(self) -> None:
        """See `Fetcher`: a read from a disk ends by itself."""


class RemoteFetcher:
    """Bounds the number and the rate of the calls of ``read``. See `Fetcher`."""

    def __init__(self, options: FetchOptions, read: ReadRange) -> None:
        self.at_once = options.connections or CONNECTIONS
        self._read = read
        self._slots = threading.Semaphore(self.at_once)
        self._cancellation = Cancellation()
        rate = options.limit_rate
        self._limit = RateLimit(rate, wait=self._cancellation.sleep) if rate is not None else None

    def fill(self, name: str, identity: Identity, begin: int, buffer: memoryview) -> None:
        """See `Fetcher`. At a limited rate each request is for a part of a second."""
        step = len(buffer) if self._limit is None else max(_LEAST_PIECE, self._limit.rate // 4)
        for at in range(0, len(buffer), step):
            piece = buffer[at : at + step]
            with self._slots:
                if self._limit is not None:
                    self._limit.take(len(piece))
                self._cancellation.check(name)
                self._read(name, identity, begin + at, piece, self._cancellation)

    def cancel(self) -> None:
        """See `Fetcher`."""
        self._cancellation.cancel()


class RateLimit:
    """A token bucket. Safe to share between threads.

    ``rate``: bytes a second. ``wait`` waits for so many seconds, or less.

    Raises: UsageError for less than 16 KiB a second, with which no request would end in time.
    """

    def __init__(
        self,
        rate: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        if rate < SLOWEST_LIMIT:
            raise UsageError(f"a limit of {rate:,} bytes a second: at least {SLOWEST_LIMIT:,}")
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
def remote_fetcher(options: FetchOptions, read: ReadRange) -> Iterator[Fetcher]:
    """Give a `RemoteFetcher`, which is cancelled at the end of the block."""
    fetcher = RemoteFetcher(options, read)
    try:
        yield fetcher
    finally:
        fetcher.cancel()


@contextmanager
def folder_fetcher(folder: Folder) -> Iterator[Fetcher]:
    """Give a fetcher that any folder can have."""
    yield FolderFetcher(folder)


@contextmanager
def fetchers_of(
    files: Mapping[str, SourceFile], options: FetchOptions
) -> Iterator[dict[str, Fetcher]]:
    """Give the fetcher of each file, by path: one for each folder."""
    with ExitStack() as stack:
        of_folder: dict[int, Fetcher] = {}
        for file in files.values():
            if id(file.folder) not in of_folder:
                fetcher = stack.enter_context(file.folder.fetcher(options))
                of_folder[id(file.folder)] = fetcher
        yield {path: of_folder[id(file.folder)] for path, file in files.items()}
