"""Samples: parts of files on servers that are measured, fetched in few large requests.

Measuring reads thousands of rows of a tensor, some kilobytes each. Rows that lie near each other
come in one request, with what is between them; several threads ask at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from blobstore.importer.loaded import LoadedBytes
from blobstore.importer.needs import needed_for
from blobstore.importer.segments import Span, united
from blobstore.source.fetching import Fetcher, FetchOptions, fetching
from blobstore.source.weights import SourceFile, SourceReaders, SourceWeight

AT_ONCE = 8
"""Threads that measure at the same time, where the processor's cores are fewer."""
_GAP = 2**20
"""Bytes that are fetched rather than asked for around: a request takes about as long."""
_MOST = 8 * 2**20


class SampleReaders(SourceReaders):
    """The source files that are measured.

    ``fetcher``: None if none of them is on a server. ``stop`` ends requests when it is set.
    """

    def __init__(self, fetcher: Fetcher | None) -> None:
        self._fetcher = fetcher
        self._loaded = LoadedBytes(self._fetch)
        super().__init__(self._loaded.open if fetcher is not None else SourceFile.open)
        self.stop = _Cancelling(fetcher)
        self.at_once = min(AT_ONCE, fetcher.at_once) if fetcher is not None else 1

    def _fetch(self, file: SourceFile, begin: int, buffer: memoryview) -> None:
        if self._fetcher is None:
            raise AssertionError("files on a disk are not loaded")
        self._fetcher.fill(file, begin, buffer)

    @contextmanager
    def having(self, source: SourceWeight, starts: Iterable[int], count: int) -> Iterator[None]:
        """Read ``count`` values from each start within the block; servers get few requests.

        Raises: as `Fetcher.fill`.
        """
        spans: dict[str, list[Span]] = {}
        if self._fetcher is not None and not source.transposed:
            for start in starts:
                for path, begin, end in needed_for(source, start, count):
                    spans.setdefault(path, []).append((begin, end))
        files = {part.file.path: part.file for part in source.parts.values()}
        parts = {
            path: [self._part(files[path], *span) for span in _requests(wanted)]
            for path, wanted in spans.items()
        }
        with self._loaded.using(parts):
            yield

    def _part(self, file: SourceFile, begin: int, end: int) -> tuple[int, memoryview]:
        data = memoryview(bytearray(end - begin))
        self._fetch(file, begin, data)
        return begin, data


def _requests(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the bytes of each request."""
    first: Span | None = None
    for begin, end in united(spans):
        if first is not None and (begin - first[1] > _GAP or end - first[0] > _MOST):
            yield first
            first = None
        first = (begin if first is None else first[0], end)
    if first is not None:
        yield first


class _Cancelling(threading.Event):
    """An event that ends requests when it is set."""

    def __init__(self, fetcher: Fetcher | None) -> None:
        super().__init__()
        self._fetcher = fetcher

    def set(self) -> None:
        super().set()
        if self._fetcher is not None:
            self._fetcher.cancel()


@contextmanager
def sample_readers(sources: Iterable[SourceWeight], fetch: FetchOptions) -> Iterator[SampleReaders]:
    """Give readers of the files of sources, which are closed at the end."""
    files = {part.file.path: part.file for source in sources for part in source.parts.values()}
    with ExitStack() as stack:
        fetcher = None
        if any(file.folder.is_remote for file in files.values()):
            fetcher = stack.enter_context(fetching(files.values(), fetch))
        readers = SampleReaders(fetcher)
        stack.callback(readers.close)
        yield readers
