"""Streamed imports of local folders: as if they were on a server, in small segments."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from blobstore.importer import schedule, segments, writing
from blobstore.io.budget import Cancellation
from blobstore.io.ranges import FileReader, Identity
from blobstore.names import Digest
from blobstore.source.folders import Folder, LocalFolder
from blobstore.store.local.store import Store

TINY = 2**13
"""Bytes of a segment: most are smaller than a tensor."""
SMALL = 2**17
"""Bytes of a segment that has several tensors."""


@dataclass
class Fetched:
    """The fetched ranges (file, begin, bytes); ``before`` precedes each; ``change``: of bytes."""

    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    before: Callable[[str, int], None] = lambda _name, _begin: None
    change: Callable[[str, int, memoryview], None] = lambda _name, _begin, _data: None

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.ranges)


@contextmanager
def streamed(nbytes: int = TINY, *, declared: bool = False) -> Iterator[Fetched]:
    """Let imports of local folders be streamed; give what they fetch.

    ``nbytes``: of a segment; four are in memory. ``declared``: as if the server declared each
    file's digest.
    """
    fetched = Fetched()
    opened = LocalFolder.open

    def fill(
        folder: LocalFolder,
        name: str,
        identity: Identity,
        begin: int,
        buffer: memoryview,
        cancellation: Cancellation,
    ) -> None:
        fetched.before(name, begin)
        Folder.fill(folder, name, identity, begin, buffer, cancellation)
        fetched.change(name, begin, buffer)
        fetched.ranges.append((name, begin, len(buffer)))

    def open_declared(folder: LocalFolder, name: str, identity: Any = None) -> FileReader:
        reader = opened(folder, name, identity)
        if declared:
            reader.declared = Digest.of((folder.path / name).read_bytes())
        return reader

    with (
        mock.patch.object(LocalFolder, "is_remote", new=True),
        mock.patch.object(LocalFolder, "fill", fill),
        mock.patch.object(LocalFolder, "open", open_declared),
        mock.patch.object(segments, "SEGMENT", nbytes),
        mock.patch.object(segments, "GAP", 64),
        mock.patch.object(writing, "SEGMENTS", 4),
        mock.patch.object(schedule, "STATES_EVERY_S", 0),
    ):
        yield fetched


class Snapshots:
    """Copies of a store, taken before each so many fetches of an import: what a kill leaves."""

    def __init__(self, store: Store, into: Path, every: int) -> None:
        self._store, self._into, self._every = store, into, every
        self._mutex = threading.Lock()
        self._calls = 0
        self.stores: list[Store] = []

    def take(self, _name: str, _begin: int) -> None:
        """Copy the store, if it is time to."""

        def copy(origin: str, to: str) -> None:
            with suppress(FileNotFoundError):  # another thread removed it
                shutil.copy2(origin, to)

        with self._mutex:
            if self._calls % self._every == 0:
                place = self._into / str(self._calls)
                shutil.copytree(self._store.root, place, copy_function=copy)
                self.stores.append(Store(place))
            self._calls += 1
