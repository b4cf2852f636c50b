"""Streamed imports of local folders: as if they were on a server, in small segments."""

from __future__ import annotations

import shutil
import threading
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
from blobstore.store.local.store import Store

TINY = SegmentSizes(aim=2**13, most=2**14, window=2**15, gap=64)
"""Many segments, most of which are smaller than a tensor."""
SMALL = SegmentSizes(aim=2**16, most=2**17, window=2**19)
"""Segments of several tensors."""


@dataclass
class Fetched:
    """The ranges that were fetched: (file, begin, bytes).

    ``before`` is called before each; ``change`` may change the bytes that come. A range comes in
    parts of ``most`` bytes, if that is not 0. ``wanted`` threads are of use.
    """

    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    before: Callable[[str, int], None] = lambda _name, _begin: None
    change: Callable[[str, int, memoryview], None] = lambda _name, _begin, _data: None
    most: int = 0
    wanted: int = 4

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

    @property
    def wanted(self) -> int:
        return self._fetched.wanted

    def fill(
        self,
        name: str,
        identity: Identity,
        begin: int,
        buffer: memoryview,
        came: Callable[[int], None] | None = None,
    ) -> None:
        for at in range(0, len(buffer), self._fetched.most or max(1, len(buffer))):
            part = buffer[at : at + self._fetched.most] if self._fetched.most else buffer
            self._fetched.before(name, begin + at)
            self._inner.fill(name, identity, begin + at, part)
            self._fetched.change(name, begin + at, part)
            self._fetched.ranges.append((name, begin + at, len(part)))
            if came is not None:
                came(len(part))


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


class Snapshots:
    """Copies of a store, taken while an import runs: what a kill leaves."""

    def __init__(self, store: Store, into: Path) -> None:
        self._store = store
        self._into = into
        self._mutex = threading.Lock()
        self.stores: list[Store] = []

    def take(self, _name: str, _begin: int) -> None:
        """Copy the store."""

        def copy(origin: str, to: str) -> None:
            try:
                shutil.copy2(origin, to)
            except FileNotFoundError:  # another thread removed it
                return

        with self._mutex:
            place = self._into / str(len(self.stores))
            shutil.copytree(self._store.root, place, copy_function=copy)
            self.stores.append(Store(place))
