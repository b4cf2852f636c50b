"""A folder behind a web server, read in ranges of its files.

A web server lists nothing, so only known names are requested: those in an index, and those that
checkpoints usually have (`LIKELY`). The Hub lists its repositories: hub.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, unquote, urlsplit

from blobstore.errors import (
    NotFoundError,
    UnsupportedSourceError,
    UsageError,
)
from blobstore.io.budget import Budget, Cancellation, RequestLimits
from blobstore.io.ranges import Identity
from blobstore.names import relative_path
from blobstore.source.folders import Entry, Folder, Found

if TYPE_CHECKING:
    from blobstore.io.http.remote_files import Remote, RemoteFile

_T = TypeVar("_T")

LIKELY = (
    "model.safetensors.index.json",
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Names to request, because a server lists nothing: those that transformers@5.3 writes."""


class WebFolder(Folder):
    """A folder on a server, which lists nothing; ``file`` is the requested file in it.

    ``url`` is the address of ``file`` as the caller gave it: it may be signed, or spelled
    differently.
    """

    def __init__(
        self,
        remote: Remote,
        base_url: str,
        *,
        file: str | None = None,
        url: str | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Raises: UsageError (rule R2) when ``base_url`` is not a web address, or has a query."""
        from blobstore.io.http.web_addresses import WebAddress

        address = WebAddress.parse(base_url)
        if "?" in address.target:
            raise UsageError(f"a folder's address has no query: {address}", rule="R2")
        self.name = self._base_url = address.text.rstrip("/") + "/"
        self.file = file
        self.budget = budget or Budget(self.name)
        self._url = url
        self._remote = remote
        self._likely: list[Entry] | None = None
        self._files: dict[tuple[str, str], RemoteFile] = {}

    @property
    def base_url(self) -> str:
        """The address of its files, with ``/`` at its end."""
        return self._base_url

    @property
    def stem(self) -> str:
        """The file's name without its suffix, else the last part of the address's path."""
        last = self.file or unquote(urlsplit(self.base_url).path.rstrip("/").rpartition("/")[2])
        return last.removesuffix(".safetensors") or str(urlsplit(self.base_url).hostname)

    @property
    def key(self) -> str:
        """The address, without a query."""
        return self.base_url + (self.file or "")

    @property
    def address(self) -> str:
        """The address, with the caller's query."""
        return self.url(self.file) if self.file else self.base_url

    def url(self, name: str) -> str:
        """Return the address of a file.

        Raises: InvalidNameError (rule P1) for a name that leads out of the folder.
        """
        if name == self.file and self._url is not None:
            return self._url
        parts = relative_path(name).split("/")
        return self.base_url + "/".join(quote(part, safe="") for part in parts)

    def place(self, name: str) -> str:
        """Return the address of a file, without its query."""
        return self.url(name).partition("?")[0]

    def names(self) -> list[str] | None:
        """Return None: a server lists nothing."""
        return None

    def scan(self, prefix: str = "", most: int | None = None) -> list[Entry]:
        """Return the `LIKELY` files that the server has; an empty list for a subfolder."""
        if prefix:
            return []
        if self._likely is None:
            urls = [self.url(name) for name in LIKELY]
            with self._remote.at_once(urls, self._entry, self.budget) as entries:
                present = [entry for entry in entries if entry is not None]
            self._likely = sorted(present, key=lambda entry: entry.name)
        return self._likely[:most]

    def _entry(self, url: str, limits: RequestLimits) -> Entry | None:
        try:
            file = self._remote.open(url, limits)
        except NotFoundError:
            return None
        with self._source(file):
            return Entry(self._name_of(file), file.name, found=Found(file.size, file.identity))

    def _name_of(self, file: RemoteFile) -> str:
        return unquote(file.name.removeprefix(self.base_url))

    def open(self, name: str, identity: Identity | None = None) -> RemoteFile:
        """Return a reader of one file, which makes one request for each range."""
        from blobstore.io.http.remote_files import changed

        file = self._source(self._remote.open(self.url(name)))
        if identity not in (None, file.identity):
            raise changed(file.name)
        return file

    def _source(self, file: RemoteFile) -> RemoteFile:
        """Return the file with its identity, and remember it."""
        self._identify(file)
        self._files[self._name_of(file), file.identity.key] = file
        return file

    def _identify(self, file: RemoteFile) -> None:
        """Set the identity of a file: its validator and size as text.

        Raises: UnsupportedSourceError when the server sends neither an ETag nor Last-Modified, so
        that a change could not be detected.
        """
        validator = file.version.etag or file.version.modified
        if validator is None:
            raise UnsupportedSourceError(
                f"{file.name}: its server does not send an ETag or Last-Modified, so it"
                " can't be read as a source",
                path=file.name,
                hint="Download the file first.",
            )
        file.identity = WebIdentity(f"{validator} {file.size}")

    def reading(
        self, names: Sequence[str], read: Callable[[RemoteFile], _T]
    ) -> AbstractContextManager[Iterator[_T]]:
        """Give the results of ``read`` for each file; several are read at once, with headers."""

        def work(url: str, limits: RequestLimits) -> _T:
            with self._remote.open(url, limits) as file:
                return read(file)

        return self._remote.at_once([self.url(name) for name in names], work, self.budget)

    def sources(
        self, names: Sequence[str], read: Callable[[RemoteFile], _T]
    ) -> AbstractContextManager[Iterator[_T]]:
        """Give the results of ``read`` for each file; several are read at once, with headers."""
        return self.reading(names, lambda file: read(self._source(file)))

    def read_all(self, names: Sequence[str], limit: int) -> dict[str, bytes]:
        """Return small files' bytes by name; several are asked for at once.

        They have the hashes that the server declared, if any.
        """

        def work(url: str, limits: RequestLimits) -> bytes:
            return self._remote.read_page(url, limit, limits=limits)[0]

        urls = [self.url(name) for name in names]
        with self._remote.at_once(urls, work, self.budget) as read:
            documents = dict(zip(names, read, strict=True))
        for name, data in documents.items():
            self._take_text(len(data), name)
            if (found := self._known(name)) is not None:
                found.check(data, self.place(name))
        return documents

    def _known(self, name: str) -> Found | None:
        """Return the state of a file that the server was asked for before."""
        return next((entry.found for entry in self._likely or () if entry.name == name), None)

    def allow(self, requests: int) -> None:
        """See `Folder`."""
        self._remote.allow(requests)

    def fill(
        self,
        name: str,
        identity: Identity,
        begin: int,
        buffer: memoryview,
        cancellation: Cancellation,
    ) -> None:
        """See `Folder`."""
        key = name, identity.key
        if key not in self._files:
            self.open(name, identity)
        self._files[key].fill(begin, buffer, cancellation=cancellation)

    def as_file(self) -> WebFolder | None:
        """Return the parent folder, with this one as its requested file; None for a host's root."""
        address = self.base_url.rstrip("/")
        if self.file is not None or not urlsplit(address).path:
            return None
        base, _, last = address.rpartition("/")
        return WebFolder(self._remote, base, file=unquote(last), url=address, budget=self.budget)

    def __exit__(self, *_: object) -> None:
        self._remote.close()


@dataclass(frozen=True, slots=True)
class WebIdentity:
    """The state of a file on a server: its validator and size as text."""

    key: str
