"""Streamed imports of local folders: as if they were on a server, in small segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from blobstore.importer.streaming.segments import SegmentSizes
from blobstore.io.ranges import Identity
from blobstore.names import Digest
from blobstore.source.fetching import Fetcher, FetchOptions, FolderFetcher
from blobstore.source.folders import LocalFolder
from blobstore.source.weights import SourceFile

TINY = SegmentSizes(aim=2**13, most=2**14, window=2**15, gap=64)
"""Many segments, most of which are smaller than a tensor."""
SMALL = SegmentSizes(aim=2**16, most=2**17, window=2**19)
"""Segments of several tensors."""


@dataclass
class Fetched:
    """The ranges that were fetched: (file, begin, bytes).

    ``before`` is called before each; ``change`` may change the bytes that come.
    """

    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    before: Callable[[str, int], None] = lambda _name, _begin: None
    change: Callable[[str, int, memoryview], None] = lambda _name, _begin, _data: None

    @property
    def nbytes(self) -> int:
        """Bytes that were fetched."""
        return sum(nbytes for _, _, nbytes in self.ranges)


class _Fetcher:
    """Fetches from a folder, several at once. See `Fetcher`."""

    at_once = 4

    def __init__(self, folder: LocalFolder, fetched: Fetched) -> None:
        self._inner = FolderFetcher(folder)
        self._fetched = fetched
        self.cancel = self._inner.cancel

    def fill(self, name: str, identity: Identity, begin: int, buffer: memoryview) -> None:
        self._fetched.before(name, begin)
        self._inner.fill(name, identity, begin, buffer)
        self._fetched.change(name, begin, buffer)
        self._fetched.ranges.append((name, begin, len(buffer)))


@contextmanager
def streamed(sizes: SegmentSizes = TINY, *, declared: bool = False) -> Iterator[Fetched]:
    """Let imports of local folders be streamed; give what they fetch.

    ``declared``: as if the server declared each file's digest.
    """
    fetched = Fetched()

    @contextmanager
    def fetcher(folder: LocalFolder, _options: FetchOptions) -> Iterator[Fetcher]:
        yield _Fetcher(folder, fetched)

    with (
        mock.patch.object(LocalFolder, "is_remote", new=True),
        mock.patch.object(LocalFolder, "fetcher", fetcher),
        mock.patch.object(SegmentSizes, "of", return_value=sizes),
        _declaring(is_on=declared),
    ):
        yield fetched


@contextmanager
def _declaring(*, is_on: bool) -> Iterator[None]:
    from blobstore.source import inventory

    made = SourceFile

    def with_digest(*args: Any) -> SourceFile:
        file = made(*args)
        return replace(file, declared=Digest.of(Path(file.path).read_bytes()))

    if not is_on:
        yield
        return
    with mock.patch.object(inventory, "SourceFile", with_digest):
        yield
