"""Samples: parts of files on servers that are measured, fetched in few large requests.

Measuring reads thousands of rows of a tensor, some kilobytes each. Rows that lie near each other
come in one request, with what is between them; several threads ask at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from blobstore.importer.streaming.agenda import united
from blobstore.importer.streaming.needs import Need, needed_for
from blobstore.importer.streaming.segments import Span
from blobstore.io.ranges import SourceReader
from blobstore.source.fetching import Fetcher, FetchOptions, fetchers_of
from blobstore.source.weights import SourceFile, SourceReaders, SourceWeight

AT_ONCE = 8
"""Threads that measure at the same time, where the processor's cores are fewer."""
_GAP = 2**20
"""Bytes that are fetched rather than asked for around: a request takes about as long."""
_MOST = 8 * 2**20


class SampledFiles:
    """Files of a source, of which each thread has the bytes that it measures in memory.

    ``fetchers``: by the path of a file.
    """

    def __init__(self, fetchers: Mapping[str, Fetcher]) -> None:
        self.fetchers = fetchers
        self._here = threading.local()

    @property
    def at_once(self) -> int:
        """How many threads are of use."""
        return min(AT_ONCE, max((one.at_once for one in self.fetchers.values()), default=1))

    @contextmanager
    def using(self, needs: Iterable[tuple[SourceFile, Need]]) -> Iterator[None]:
        """Fetch bytes, which this thread can read within the block. Raises: as `Fetcher.fill`."""
        spans: dict[str, tuple[SourceFile, list[Span]]] = {}
        for file, need in needs:
            spans.setdefault(file.path, (file, []))[1].append((need.begin, need.end))
        self._here.parts = {
            path: [part for request in _requests(wanted) for part in self._fetch(file, request)]
            for path, (file, wanted) in spans.items()
        }
        try:
            yield
        finally:
            self._here.parts = {}

    def _fetch(self, file: SourceFile, wanted: list[Span]) -> Iterator[tuple[int, memoryview]]:
        origin = wanted[0][0]
        data = memoryview(bytearray(wanted[-1][1] - origin))
        self.fetchers[file.path].fill(file.name, file.identity, origin, data)
        for begin, end in wanted:
            yield begin, memoryview(bytes(data[begin - origin : end - origin]))

    def find(self, path: str, begin: int, end: int) -> memoryview | None:
        """Return bytes of a file, if this thread has fetched them."""
        parts: list[tuple[int, memoryview]] = getattr(self._here, "parts", {}).get(path, [])
        for at, data in parts:
            if at <= begin and end <= at + len(data):
                return data[begin - at : end - at]
        return None

    def open(self, file: SourceFile) -> SampledFile:
        """Return a reader of a file."""
        return SampledFile(file, self)


def _requests(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Yield the spans of each request."""
    together: list[Span] = []
    for begin, end in united(spans):
        if together and (begin - together[-1][1] > _GAP or end - together[0][0] > _MOST):
            yield together
            together = []
        together.append((begin, end))
    if together:
        yield together


class SampledFile(SourceReader):
    """A file on a server: what was not fetched before is fetched when it is read."""

    def __init__(self, file: SourceFile, sampled: SampledFiles) -> None:
        self.name = file.path
        self.size = file.size
        self.identity = file.identity
        self._file = file
        self._sampled = sampled

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See `OpenReader.readinto`."""
        data = self._sampled.find(self.name, offset, offset + len(buffer))
        if data is not None:
            buffer[:] = data
        elif len(buffer):
            file = self._file
            self._sampled.fetchers[file.path].fill(file.name, file.identity, offset, buffer)

    def read(self, offset: int, length: int) -> bytes:
        """See `OpenReader.read`."""
        data = bytearray(length)
        self.readinto(offset, memoryview(data))
        return bytes(data)

    def check_unchanged(self) -> None:
        """Do nothing: each range was checked when it was fetched."""


class SampleReaders(SourceReaders):
    """The source files that are measured; ``sampled`` if they are on servers.

    ``stop`` ends requests to servers when it is set.
    """

    def __init__(self, sampled: SampledFiles | None) -> None:
        super().__init__(SourceFile.open if sampled is None else sampled.open)
        self._sampled = sampled
        self.stop = threading.Event() if sampled is None else _Cancel(sampled)
        self.at_once = 1 if sampled is None else sampled.at_once

    @contextmanager
    def having(self, source: SourceWeight, starts: Iterable[int], count: int) -> Iterator[None]:
        """Read ``count`` values from each start within the block; servers get few requests.

        Raises: as `Fetcher.fill`.
        """
        if self._sampled is None or source.transposed:
            yield
            return
        files = {part.file.path: part.file for part in source.parts.values()}
        needs = (need for start in starts for need in needed_for(source, start, count))
        with self._sampled.using((files[need.path], need) for need in needs):
            yield


class _Cancel(threading.Event):
    """An event that ends requests when it is set."""

    def __init__(self, sampled: SampledFiles) -> None:
        super().__init__()
        self._fetchers = {id(one): one for one in sampled.fetchers.values()}

    def set(self) -> None:
        super().set()
        for fetcher in self._fetchers.values():
            fetcher.cancel()


@contextmanager
def sample_readers(sources: Iterable[SourceWeight], fetch: FetchOptions) -> Iterator[SampleReaders]:
    """Give readers of the files of sources, which are closed at the end."""
    files = {part.file.path: part.file for source in sources for part in source.parts.values()}
    with ExitStack() as stack:
        sampled = None
        if any(file.folder.is_remote for file in files.values()):
            sampled = SampledFiles(stack.enter_context(fetchers_of(files, fetch)))
        readers = SampleReaders(sampled)
        stack.callback(readers.close)
        yield readers
