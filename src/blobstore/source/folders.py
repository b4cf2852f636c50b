"""Folders: where the files of a checkpoint are listed and opened by name, on a disk or behind a server.

Whoever reads a checkpoint reads it through `Folder`, so that it does not matter where the files lie. A name is one plain
file name; what an index or a listing says is checked before it becomes a name.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from blobstore.errors import LimitExceededError, NotFoundError, from_os_error
from blobstore.ranges import FileReader, RangeReader

if TYPE_CHECKING:
    from blobstore.remote import RemoteFolder


class Folder(Protocol):
    """Files by name."""

    @property
    def name(self) -> str:
        """Path or address of the folder, for messages."""

    def place(self, name: str) -> str:
        """Return the path or address of a file, there or not."""

    def names(self) -> list[str] | None:
        """Return the names of its files, sorted; None where a server does not list them. Raises: StorageError."""

    def opened(self, names: Sequence[str]) -> AbstractContextManager[Iterable[RangeReader]]:
        """Give readers over files, in the order of ``names``, each to be used before the next is asked for.

        Raises: NotFoundError when one is missing; StorageError; RemoteError.
        """

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file's bytes. Raises: as `opened`; LimitExceededError when they are more than ``limit``."""


class LocalFolder:
    """A folder on a disk. Its links are followed: the Hugging Face cache is made of links."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def place(self, name: str) -> str:
        """Return the path of a file, there or not."""
        return str(self.path / name)

    def names(self) -> list[str]:
        """Return the names of its files, sorted."""
        try:
            with os.scandir(self.path) as entries:
                # Everything except folders: a broken link or a FIFO is refused when it is opened, and does not vanish here.
                return sorted(entry.name for entry in entries if not _is_folder(entry))
        except OSError as error:
            raise from_os_error(error, "list", self.path) from error

    def open(self, name: str) -> FileReader:
        """Return a reader over one file."""
        try:
            return FileReader(self.path / name)
        except NotFoundError as error:
            raise broken_link(self.path / name) or error from None

    @contextmanager
    def opened(self, names: Sequence[str]) -> Iterator[Iterator[FileReader]]:
        """Give readers over files, of which one is open at a time."""
        readers = self._readers(names)
        try:
            yield readers
        finally:
            readers.close()

    def _readers(self, names: Sequence[str]) -> Generator[FileReader]:
        for name in names:
            with self.open(name) as reader:
                yield reader

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file's bytes."""
        with self.open(name) as reader:
            if reader.size > limit:
                path = self.place(name)
                raise LimitExceededError(f"limit exceeded: {path} has {reader.size:,} bytes, at most {limit:,}", path=path)
            return reader.read(0, reader.size)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links
        return False


def broken_link(path: Path) -> NotFoundError | None:
    """Return the error for a link to a missing file, None for any other path."""
    if not path.is_symlink():
        return None
    message = f"{path} is a link to {path.readlink()}, which is missing"
    return NotFoundError(message, path=str(path), hint="If it is in the Hugging Face cache: download the model again.")


class WebFolder:
    """A folder behind a server, which lists nothing. Opened files have been read as far as their headers go."""

    def __init__(self, folder: RemoteFolder) -> None:
        self._folder = folder
        self.name = folder.base_url

    def place(self, name: str) -> str:
        """Return the address of a file."""
        return self._folder.url(name)

    def names(self) -> None:
        """Return None: the names have to be known."""

    @contextmanager
    def opened(self, names: Sequence[str]) -> Iterator[Sequence[RangeReader]]:
        """Give readers over files, which were opened at once."""
        yield self._folder.open_all(names)

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file's bytes."""
        return self._folder.read(name, limit)
