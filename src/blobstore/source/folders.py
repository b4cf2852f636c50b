"""Folders: where the files of a checkpoint are listed and opened by name, on a disk or behind a server.

Every reader of a checkpoint reads it through `Folder`, so it does not matter where the files lie.
A name is a relative path; the names in an index or a listing are checked before they are used. A
folder has the budget of its checkpoint: every header and document is counted before it is read.

A file has an identity, which changes when its bytes do: device, inode, size and times on a disk,
the ETag (or Last-Modified) and size on a server, the content's hash in a repository of the Hub
(hub.py).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Protocol, Self, TypeVar

from blobstore.errors import (
    LimitExceededError,
    MissingFileError,
    NotFoundError,
    from_os_error,
)
from blobstore.io.budget import Budget
from blobstore.io.ranges import (
    FileIdentity,
    FileReader,
    Identity,
    OpenReader,
    RangeReader,
    real_path,
)
from blobstore.names import Digest

_T = TypeVar("_T")
SUFFIX = ".safetensors"


class Entry(Protocol):
    """A file or folder in a folder, as the folder lists it."""

    @property
    def name(self) -> str:
        """Its own name, without those of the folders that it is in."""

    @property
    def place(self) -> str:
        """Its real path or its address."""

    @property
    def is_folder(self) -> bool:
        """True for a folder; False for a link to one."""

    def fault(self) -> str | None:
        """Return why the entry can't be followed: it is a link that leads elsewhere."""

    def found(self) -> Found | None:
        """Return the file's state; None when it is not a regular file.

        Raises: NotFoundError for a link to a missing file; StorageError.
        """


@dataclass(frozen=True, slots=True)
class Found:
    """The state of a file: bytes, identity, and the digest that its server declares, if it does."""

    size: int
    identity: Identity
    declared: Digest | None = None


class SourceReader(OpenReader, Protocol):
    """A reader of one file of a source. Reading a file that has changed raises CorruptDataError."""

    @property
    def identity(self) -> Identity:
        """The file's state when it was opened."""

    def check_unchanged(self) -> None:
        """Raise CorruptDataError when the file was written to, replaced or removed meanwhile."""


class Folder(Protocol):
    """Files by name. A context manager, which closes its connections at the end."""

    @property
    def name(self) -> str:
        """Path or address of the folder, for messages."""

    @property
    def file(self) -> str | None:
        """The file in it that was asked for; None for the folder itself."""

    @property
    def stem(self) -> str:
        """What a model that is made from it is called: the last part of its name."""

    @property
    def key(self) -> str:
        """A text that is the same whenever the same source is opened: a real path, or an address."""

    @property
    def address(self) -> str:
        """What opens the same source again: an absolute path, or an address of this version."""

    @property
    def budget(self) -> Budget:
        """What reading its headers and documents may take in all."""

    def as_file(self) -> Folder | None:
        """Return the folder above, asked for this one as its file; None where that can't be.

        An address that does not end as a file's may still be one.
        """

    def place(self, name: str) -> str:
        """Return the path or address of a file, there or not."""

    def names(self) -> list[str] | None:
        """Return the names of its files, sorted; None where a server does not list them.

        Raises: StorageError, RemoteError.
        """

    def scan(self, prefix: str = "", most: int | None = None) -> list[Entry]:
        """Return what lies in it, or in its folder ``prefix`` (with ``/`` at its end), sorted by name.

        At most ``most`` entries, in any order of choice. A server that lists nothing is asked for
        the `LIKELY` ones. Raises: StorageError, RemoteError.
        """

    def distinct(self, names: Sequence[str]) -> list[str]:
        """Return the first name of each file among ``names``, in their order: others are links to it."""

    def open(self, name: str, identity: Identity | None = None) -> SourceReader:
        """Return a reader of one file, which has ``identity``, where that is given.

        Raises: NotFoundError; CorruptDataError for another identity; StorageError, RemoteError;
        UnsupportedSourceError when parts of the file can't be read, or a change not be seen.
        """

    def reading(
        self, names: Sequence[str], read: Callable[[RangeReader], _T]
    ) -> AbstractContextManager[Iterator[_T]]:
        """Give what ``read`` makes of a reader over each file, in the order of ``names``.

        The first error ends it, and so does leaving the block: no other file is opened then.

        Raises: NotFoundError when a file is missing; StorageError; RemoteError; LimitExceededError;
        as ``read``.
        """

    def sources(
        self, names: Sequence[str], read: Callable[[SourceReader], _T]
    ) -> AbstractContextManager[Iterator[_T]]:
        """As `reading`, of files that are read again later, with the same identity.

        Raises: as `reading` and `open`.
        """

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file's bytes.

        Raises: NotFoundError, StorageError, RemoteError; LimitExceededError when they are more than
        ``limit``, or than is left of the budget.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class LocalFolder:
    """A folder on a disk. Its links are followed: the Hugging Face cache is made of links."""

    def __init__(self, path: Path, file: str | None = None) -> None:
        self.path = path
        self.name = str(path)
        self.file = file
        self.budget = Budget(self.name)

    @property
    def stem(self) -> str:
        """The file's name without its suffix, the repository's of a snapshot, else the folder's."""
        from blobstore.source.hub import repository_name

        path = Path(self.address)
        return path.stem if self.file else repository_name(path) or path.name

    @property
    def key(self) -> str:
        """The real path."""
        return real_path(self.path / (self.file or ""))

    @property
    def address(self) -> str:
        """The absolute path."""
        try:  # not resolve(), which would follow a link to another name
            return os.path.abspath(self.path / (self.file or ""))  # noqa: PTH100
        except OSError as error:  # the current folder may be gone
            raise from_os_error(error, "access", self.path) from error

    def as_file(self) -> None:
        """Return None: a disk says whether it is a file."""

    def place(self, name: str) -> str:
        """Return the path of a file, there or not."""
        return str(self.path / name)

    def names(self) -> list[str]:
        """Return the names of its files, sorted.

        Everything except folders: a broken link or a FIFO is refused when it is opened, and does
        not vanish here.
        """
        try:
            with os.scandir(self.path) as entries:
                return sorted(entry.name for entry in entries if not _is_folder(entry))
        except OSError as error:
            raise from_os_error(error, "list", self.path) from error

    def scan(self, prefix: str = "", most: int | None = None) -> list[Entry]:
        """Return what lies in it."""
        try:
            with os.scandir(self.path / prefix) as found:
                entries = [LocalEntry(entry, self._homes) for entry in islice(found, most)]
        except OSError as error:
            raise from_os_error(error, "list", self.path / prefix) from error
        return sorted(entries, key=lambda entry: entry.name)

    @cached_property
    def _homes(self) -> tuple[str, ...]:
        """The folders that links may lead into: this one, and of a snapshot its repository's.

        A snapshot is ``models--ORG--NAME/snapshots/REVISION``; its files are links into
        ``models--ORG--NAME/blobs``.
        """
        real = Path(real_path(self.path))
        return (str(real), *([str(real.parent.parent)] if real.parent.name == "snapshots" else []))

    def open(self, name: str, identity: Identity | None = None) -> FileReader:
        """Return a reader over one file; with an ``identity`` one that will be read to its end."""
        try:
            reader = FileReader(self.path / name)
        except NotFoundError as error:
            raise broken_link(self.path / name) or error from None
        if identity is not None:
            try:
                reader.settle()
                reader.check_is(identity)
            except BaseException:
                reader.close()
                raise
            reader.read_ahead()
        return reader

    def distinct(self, names: Sequence[str]) -> list[str]:
        """Return the first name of each file: others may be links to it."""
        files: dict[object, str] = {}
        for name in names:
            try:
                status = (self.path / name).stat()
            except OSError:  # opening it raises the error that says why
                files[name] = name
            else:
                files.setdefault((status.st_dev, status.st_ino), name)
        return list(files.values())

    @contextmanager
    def reading(
        self, names: Sequence[str], read: Callable[[FileReader], _T]
    ) -> Iterator[Iterator[_T]]:
        """Give what ``read`` makes of each file; one is open at a time."""
        yield map(partial(self._read_one, read), names)

    sources = reading

    def _read_one(self, read: Callable[[FileReader], _T], name: str) -> _T:
        with self.open(name) as reader:
            return read(reader)

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file's bytes."""
        with self.open(name) as reader:
            if reader.size > limit:
                path = self.place(name)
                raise LimitExceededError(
                    f"limit exceeded: {path} has {reader.size:,} bytes, at most {limit:,}",
                    path=path,
                )
            take_text(self.budget, reader.size, reader.name)
            return reader.read(0, reader.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass(frozen=True, slots=True)
class LocalEntry:
    """An entry of a folder on a disk; links may lead into ``homes``."""

    entry: os.DirEntry[str]
    homes: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its own name."""
        return self.entry.name

    @property
    def place(self) -> str:
        """Its real path."""
        return real_path(self.entry.path)

    @property
    def is_folder(self) -> bool:
        """True for a folder; False for a link to one."""
        return self.entry.is_dir(follow_symlinks=False)

    def fault(self) -> str | None:
        """Return why a link is not followed: it leads to a folder, perhaps back, or out of the checkpoint."""
        if not self.entry.is_symlink():
            return None
        if _is_folder(self.entry):
            return "a link to a folder"
        is_inside = any(self.place.startswith(f"{home}{os.sep}") for home in self.homes)
        return None if is_inside else "a link to a place outside of the checkpoint's folder"

    def found(self) -> Found | None:
        """Return the file's state; None when it is not a regular file."""
        try:
            status = self.entry.stat()
        except FileNotFoundError as error:  # in the Hugging Face cache: a download that was cut off
            missing = from_os_error(error, "stat", self.entry.path)
            raise broken_link(Path(self.entry.path)) or missing from error
        except OSError as error:
            raise from_os_error(error, "stat", self.entry.path) from error
        return Found(status.st_size, FileIdentity(status)) if stat.S_ISREG(status.st_mode) else None


def take_text(budget: Budget, nbytes: int, place: str) -> None:
    """Count a document of a checkpoint. Raises: LimitExceededError with ``path``."""
    try:
        budget.take_text(nbytes, "the file")
    except LimitExceededError as error:
        raise error.at(place, path=place) from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links
        return False


def broken_link(path: Path) -> NotFoundError | None:
    """Return the error for a link to a missing file; None for any other path, and on failure."""
    try:
        target = path.readlink()
    except OSError:
        return None
    message = f"{path} is a link to {target}, which is missing"
    return MissingFileError(
        message,
        path=str(path),
        hint="If it is in the Hugging Face cache: download the model again.",
    )
