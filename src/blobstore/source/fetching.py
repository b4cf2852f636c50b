"""Fetching: the files of one folder read in large ranges, many at once.

An import that streams its source (importer/streaming/) asks a folder for a `Fetcher`. Folders on
servers fetch over several connections, whose number they find by measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.io.http.direct import Came
    from blobstore.io.ranges import Identity
    from blobstore.source.folders import Folder
    from blobstore.source.weights import SourceFile


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """How files are fetched.

    ``connections``: requests at once; None finds their number by measurement. ``limit_rate``: bytes
    a second of all connections together; None is as many as come. Raises: UsageError for less than
    one of either.
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
        """How many threads may be of use at most: as many ranges as may be fetched at once."""

    @property
    def wanted(self) -> int:
        """How many threads are of use now: one to ``at_once``."""

    def fill(
        self,
        name: str,
        identity: Identity,
        begin: int,
        buffer: memoryview,
        came: Came | None = None,
    ) -> None:
        """Fill ``buffer`` with the bytes of a file from byte ``begin`` on, in their order.

        ``came`` is told how many there are since it was told last. The call waits until one more
        request may run. Raises: CorruptDataError when the file has another identity now;
        NotFoundError; ShortReadError; RemoteError; StorageError; as ``came``.
        """

    def cancel(self) -> None:
        """End all requests, from any thread: calls of `fill` raise RemoteError soon."""


class FolderFetcher:
    """Reads ranges through a folder's own readers, one after the other. See `Fetcher`."""

    at_once = wanted = 1

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def fill(
        self,
        name: str,
        identity: Identity,
        begin: int,
        buffer: memoryview,
        came: Came | None = None,
    ) -> None:
        """See `Fetcher`."""
        with self._folder.open(name, identity) as reader:
            reader.readinto(begin, buffer)
        if came is not None:
            came(len(buffer))

    def cancel(self) -> None:
        """See `Fetcher`: a read from a disk ends by itself."""


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
