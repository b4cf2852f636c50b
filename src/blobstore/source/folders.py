"""Folders: where the files of a checkpoint are listed and opened by name, on a disk or behind a server.

Whoever reads a checkpoint reads it through `Folder`, so that it does not matter where the files lie. A name is one plain
file name; what an index or a listing says is checked before it becomes a name.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from blobstore.errors import LimitExceededError, from_os_error
from blobstore.ranges import FileReader, RangeReader


class Folder(Protocol):
    """Files by name."""

    @property
    def name(self) -> str:
        """Path or address of the folder, for messages."""

    @property
    def at_once(self) -> int:
        """How many files it is worth to read at the same time."""

    def place(self, name: str) -> str:
        """Return the path or address of a file, there or not."""

    def names(self) -> list[str] | None:
        """Return the names of its files, sorted; None where a server does not list them. Raises: StorageError."""

    def open(self, name: str) -> AbstractContextManager[RangeReader]:
        """Return a reader over a file. Raises: NotFoundError when there is none; StorageError."""

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file's bytes. Raises: as `open`; LimitExceededError when they are more than ``limit``."""


class LocalFolder:
    """A folder on a disk. Its links are followed: the Hugging Face cache is made of links."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.at_once = min(8, os.cpu_count() or 1)

    def place(self, name: str) -> str:
        """Return the path of a file, there or not."""
        return str(self.path / name)

    def names(self) -> list[str]:
        """Return the names of its files, sorted."""
        try:
            with os.scandir(self.path) as entries:
                # Whatever is no folder: a dangling link or a FIFO is refused when it is opened, and does not vanish here.
                return sorted(entry.name for entry in entries if not entry.is_dir())
        except OSError as error:
            raise from_os_error(error, "list", self.path) from error

    def open(self, name: str) -> FileReader:
        """Return a reader over a file."""
        return FileReader(self.path / name)

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file's bytes."""
        with self.open(name) as reader:
            if reader.size > limit:
                path = self.place(name)
                raise LimitExceededError(f"limit exceeded: {path} has {reader.size:,} bytes, at most {limit:,}", path=path)
            return reader.read(0, reader.size)
