"""Folders: where the files of a checkpoint are listed and opened by name, on a disk or behind a server.

Whoever reads a checkpoint reads it through `Folder`, so that it does not matter where the files
lie. A name is one plain file name; what an index or a listing says is checked before it becomes a
name. A folder has the budget of its checkpoint, where every header and document is counted before
it is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import quote

from blobstore.errors import (
    LimitExceededError,
    MissingFileError,
    NotFoundError,
    UsageError,
    from_os_error,
    quoted,
)
from blobstore.io.budget import Budget
from blobstore.io.ranges import FileReader, RangeReader
from blobstore.names import relative_path

if TYPE_CHECKING:
    from blobstore.io.http.reader import HttpReader, Remote


_T = TypeVar("_T")


class Folder(Protocol):
    """Files by name."""

    @property
    def name(self) -> str:
        """Path or address of the folder, for messages."""

    @property
    def budget(self) -> Budget:
        """What reading its files may take in all."""

    def place(self, name: str) -> str:
        """Return the path or address of a file, there or not."""

    def names(self) -> list[str] | None:
        """Return the names of its files, sorted; None where a server does not list them.

        Raises: StorageError.
        """

    def distinct(self, names: Sequence[str]) -> list[str]:
        """Return the first name of each file among those that ``names`` are, in their order."""

    def reading(
        self, names: Sequence[str], read: Callable[[RangeReader], _T]
    ) -> AbstractContextManager[Iterator[_T]]:
        """Give what ``read`` makes of a reader over each file, in the order of ``names``.

        The first error ends it, and so does leaving the block: no other file is opened then.

        Raises: NotFoundError when a file is missing; StorageError; RemoteError; LimitExceededError;
        what ``read`` raises.
        """

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file's bytes.

        Raises: NotFoundError, StorageError, RemoteError; LimitExceededError when they are more than
        ``limit``, or than is left of the budget.
        """


class LocalFolder:
    """A folder on a disk. Its links are followed: the Hugging Face cache is made of links."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.budget = Budget(self.name)

    def place(self, name: str) -> str:
        """Return the path of a file, there or not."""
        return str(self.path / name)

    def names(self) -> list[str]:
        """Return the names of its files, sorted."""
        try:
            with os.scandir(self.path) as entries:
                # Everything except folders: a broken link or a FIFO is refused when it is opened,
                # and does not vanish here.
                return sorted(entry.name for entry in entries if not _is_folder(entry))
        except OSError as error:
            raise from_os_error(error, "list", self.path) from error

    def open(self, name: str) -> FileReader:
        """Return a reader over one file."""
        try:
            return FileReader(self.path / name)
        except NotFoundError as error:
            raise broken_link(self.path / name) or error from None

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
        self, names: Sequence[str], read: Callable[[RangeReader], _T]
    ) -> Iterator[Iterator[_T]]:
        """Give what ``read`` makes of each file; one is open at a time."""
        yield map(partial(self._read_one, read), names)

    def _read_one(self, read: Callable[[RangeReader], _T], name: str) -> _T:
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
    """Return the error for a link to a missing file, None for any other path and where that can't be told."""
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


class WebFolder:
    """A folder behind a server, which lists nothing.

    Opened files have been read as far as their headers go.
    """

    def __init__(self, folder: RemoteFolder, budget: Budget) -> None:
        self._folder = folder
        self.name = folder.base_url
        self.budget = budget

    def place(self, name: str) -> str:
        """Return the address of a file."""
        return self._folder.url(name)

    def names(self) -> None:
        """Return None: the names have to be known."""

    def distinct(self, names: Sequence[str]) -> list[str]:
        """Return the names: a server does not say which of them are one file."""
        return list(names)

    def reading(
        self, names: Sequence[str], read: Callable[[RangeReader], _T]
    ) -> AbstractContextManager[Iterator[_T]]:
        """Give what ``read`` makes of each file; several are read at once."""
        return self._folder.reading(names, read, self.budget)

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file's bytes."""
        data = self._folder.read(name, limit, self.budget)
        take_text(self.budget, len(data), self.place(name))
        return data


HUB = "https://huggingface.co"
MAIN = "main"
# huggingface_hub@1.5 utils/_validators.py `validate_repo_id`: each part of at most 96 characters,
# none of which is a hyphen or a dot at an end or beside another; repositories without an owner are
# the Hub's oldest.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_]|[.-](?![.-]|/|$)){0,95}"
_REPOSITORY = re.compile(rf"(?:{_PART}/)?{_PART}", re.ASCII)
# git-check-ref-format(1): what a branch or tag can't have in its name; a commit's hash passes as
# well.
_REVISION = re.compile(
    r"(?![/.-]|@$)(?!.*(?://|\.\.|@\{|/\.|\.lock(?:/|$)))[!-~]{1,255}(?<![/.])", re.ASCII
)
_NOT_IN_REVISION = frozenset(" ~^:?*[\\")


class RemoteFolder:
    """Files beside each other on a web server. Nothing lists them: names have to be known."""

    def __init__(self, remote: Remote, base_url: str) -> None:
        """Raises: UsageError (rule R2) when ``base_url`` is not a web address, or has a query."""
        from blobstore.io.http.addresses import WebAddress

        address = WebAddress.parse(base_url)
        if "?" in address.target:
            raise UsageError(f"a folder's address has no query: {address}", rule="R2")
        self.base_url = address.text.rstrip("/") + "/"
        self._remote = remote

    def url(self, name: str) -> str:
        """Return the address of a file.

        Raises: InvalidNameError (rule P1) for a name that leads elsewhere.
        """
        return self.base_url + "/".join(
            quote(part, safe="") for part in relative_path(name).split("/")
        )

    def open(self, name: str) -> HttpReader:
        """Return a reader of one file. Raises: as `Remote.open`."""
        return self._remote.open(self.url(name))

    def open_all(self, names: Iterable[str]) -> list[HttpReader]:
        """Return readers of several files, opened at once. Raises: as `Remote.open_all`."""
        return self._remote.open_all([self.url(name) for name in names])

    def reading(
        self, names: Sequence[str], read: Callable[[HttpReader], _T], budget: Budget | None = None
    ) -> AbstractContextManager[Iterator[_T]]:
        """Give what ``read`` makes of each file, in the order of ``names``. As `Remote.reading`."""
        return self._remote.reading([self.url(name) for name in names], read, budget)

    def read(self, name: str, limit: int, budget: Budget | None = None) -> bytes:
        """Return all of a small file. Raises: as `Remote.read_document`."""
        return self._remote.read_document(self.url(name), limit, budget)

    def find(self, name: str, limit: int) -> bytes | None:
        """Return all of a small file, None if it does not exist.

        Raises: as `Remote.read_document`.
        """
        try:
            return self.read(name, limit)
        except NotFoundError:
            return None


def hub_folder(
    remote: Remote, repository: str, revision: str = MAIN, endpoint: str = HUB
) -> RemoteFolder:
    """Return the files of a repository at a revision (branch, tag or commit) of the Hugging Face Hub.

    A token of ``remote`` is for the endpoint, when this is the first address it is used with.

    Raises: UsageError (rule R2) for an invalid repository name, revision or web address.
    """
    if _REPOSITORY.fullmatch(repository) is None or repository.endswith(".git"):
        what = f"not a repository's name: {quoted(repository)} (rule R2)"
        raise UsageError(what, rule="R2", hint="It is ORGANISATION/NAME, such as bigscience/bloom.")
    if _REVISION.fullmatch(revision) is None or _NOT_IN_REVISION & set(revision):
        raise UsageError(f"not a branch, tag or commit: {quoted(revision)} (rule R2)", rule="R2")
    base = f"{endpoint.rstrip('/')}/{repository}/resolve/{quote(revision, safe='')}/"
    remote.client.start(base)
    return RemoteFolder(remote, base)
