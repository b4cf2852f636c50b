"""Folders on web servers, read in ranges of their files; and the Hugging Face Hub.

A web server lists nothing, so only known names are requested: those in an index, and those that
checkpoints usually have (`_LIKELY`).

``hf://`` addresses follow huggingface_hub's grammar (utils/_hf_uris.py at version 2.4.0):
``hf://[models/]ORG/NAME[@REVISION][/PATH]``, where a revision is one segment, its slashes as
``%2F``, or ``refs/pr/N`` or ``refs/convert/NAME``. Addresses of the Hub's pages
(``https://huggingface.co/ORG/NAME/tree/main``) mean the repositories that they show.

A repository is read at one commit: the one that its branch or tag stood for when it was opened. The
listing gives the hash of each file's content. Source: huggingface_hub@2.4.0 hf_api.py
`HfApi.model_info`, `HfApi.list_repo_tree`, `RepoFile`; utils/_pagination.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from blobstore.errors import (
    BlobStoreError,
    InvalidNameError,
    LimitExceededError,
    NotFoundError,
    RemoteError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.formats import strictjson
from blobstore.io.budget import Budget, Cancellation, RequestLimits
from blobstore.io.http.remote_files import Remote, RemoteFile, changed_error
from blobstore.io.http.web_addresses import WebAddress
from blobstore.io.ranges import UNKNOWN_SIZE, Identity
from blobstore.names import Digest, relative_path
from blobstore.source.files import MAX_DEPTH, is_index, split_file
from blobstore.source.folders import (
    HUB,
    HUB_SCHEME,
    MAIN,
    Entry,
    Folder,
    Found,
    WebIdentity,
    stem_of,
)

_T = TypeVar("_T")

# Names to request, because a server lists nothing: those that transformers@5.3 writes.
_LIKELY = (
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


class WebFolder(Folder):
    """A folder on a server, which lists nothing; ``file`` is the requested file in it.

    ``url`` is the address of ``file`` as the caller gave it: it may be signed, or written
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
        address = WebAddress.parse(base_url)
        if "?" in address.target:
            raise UsageError(f"a folder's address has no query: {address}", rule="R2")
        self.name = self._base_url = address.text.rstrip("/") + "/"
        self.file = file
        self.budget = budget or Budget(self.name)
        self._url = url
        self._remote = remote
        self._files: dict[tuple[str, str], RemoteFile] = {}

    @property
    def base_url(self) -> str:
        return self._base_url

    @property
    def stem(self) -> str:
        last = self.file or unquote(urlsplit(self.base_url).path.rstrip("/").rpartition("/")[2])
        return stem_of(last) or str(urlsplit(self.base_url).hostname)

    @property
    def key(self) -> str:
        return self.base_url + (self.file or "")

    @property
    def address(self) -> str:
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
        return self.url(name).partition("?")[0]

    def names(self) -> list[str] | None:
        return None

    def scan(self, prefix: str = "", most: int | None = None) -> list[Entry]:
        return [] if prefix else self._likely[:most]

    @cached_property
    def _likely(self) -> list[Entry]:
        with self._remote.at_once([*map(self.url, _LIKELY)], self._entry, self.budget) as entries:
            present = [entry for entry in entries if entry is not None]
        return sorted(present, key=lambda entry: entry.name)

    def _entry(self, url: str, limits: RequestLimits) -> Entry | None:
        try:
            file = self._open_remote(url, limits)
        except NotFoundError:
            return None
        with file:
            return Entry(self._name_of(file), file.name, found=Found(file.size, file.identity))

    def _name_of(self, file: RemoteFile) -> str:
        return unquote(file.name.removeprefix(self.base_url))

    def open(self, name: str, identity: Identity | None = None) -> RemoteFile:
        file = self._open_remote(self.url(name))
        if identity not in (None, file.identity):
            raise changed_error(file.name)
        return file

    def _open_remote(self, url: str, limits: RequestLimits | None = None) -> RemoteFile:
        file = self._remote.open(url, limits)
        file.identify = self._identify
        return file

    def _identify(self, file: RemoteFile) -> Identity:
        entry = self._found(file)
        file.declared = entry.declared
        self._files[self._name_of(file), entry.identity.key] = file
        return entry.identity

    def _found(self, file: RemoteFile) -> Found:
        """Return the state of a file; its identity is its validator and size as text.

        Raises: UnsupportedSourceError when the server sends neither an ETag nor Last-Modified, so
        that a change could not be detected, or whole files only, or not their size.
        """
        validator = file.version.etag or file.version.modified
        if validator is None or file.size == UNKNOWN_SIZE:
            file.close()
            raise UnsupportedSourceError(
                f"{file.name}: its server does not send its size, or an ETag or"
                " Last-Modified, or ranges of bytes, so it can't be read as a source",
                path=file.name,
                hint="Download the file first.",
            )
        return Found(file.size, WebIdentity(f"{validator} {file.size}"))

    def read_each(
        self, names: Sequence[str], read: Callable[[RemoteFile], _T]
    ) -> AbstractContextManager[Iterator[_T]]:

        def work(url: str, limits: RequestLimits) -> _T:
            with self._open_remote(url, limits) as file:
                return read(file)

        return self._remote.at_once([self.url(name) for name in names], work, self.budget)

    def read_all(self, names: Sequence[str], limit: int) -> dict[str, bytes]:

        def work(url: str, limits: RequestLimits) -> bytes:
            return self._remote.read_page(url, limit, limits)[0]

        with self._remote.at_once([*map(self.url, names)], work, self.budget) as read:
            documents = dict(zip(names, read, strict=True))
        for name, data in documents.items():
            self._take_text(len(data), name)
        return documents

    def allow(self, requests: int) -> None:
        self._remote.allow(requests)

    def fill(
        self,
        name: str,
        identity: Identity,
        begin: int,
        buffer: memoryview,
        cancellation: Cancellation,
    ) -> None:
        key = name, identity.key
        if key not in self._files:
            self.open(name, identity)
        self._files[key].fill(begin, buffer, cancellation=cancellation)

    def as_file(self) -> WebFolder | None:
        address = self.base_url.rstrip("/")
        if self.file is not None or not urlsplit(address).path:
            return None
        base, _, last = address.rpartition("/")
        return WebFolder(self._remote, base, file=unquote(last), url=address, budget=self.budget)

    def close(self) -> None:
        self._remote.close()


# huggingface_hub@1.5 utils/_validators.py `validate_repo_id`: each part of at most 96 characters,
# none of which is a hyphen or a dot at an end or beside another; repositories without an owner are
# the Hub's oldest.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_]|[.-](?![.-]|/|$)){0,95}"
_REPOSITORY = re.compile(rf"(?:{_PART}/)?{_PART}", re.ASCII)
# git-check-ref-format(1): what a branch or tag can't have in its name; a commit's hash passes as
# well.
_REVISION = re.compile(
    r"(?![/.-]|@$)(?!.*(?:[~^:?*\[\\]|//|\.\.|@\{|/\.|\.lock(?:/|$)))[!-~]{1,255}(?<![/.])",
    re.ASCII,
)
_REFERENCE = r"refs/(?:convert/[A-Za-z0-9_.-]+|pr/[0-9]+)"
_PLAIN_REFERENCE = re.compile(_REFERENCE, re.ASCII)
_IN_HUB = re.compile(
    rf"(?:models/)?(?P<repository>[^/@]*(?:/[^/@]*)?)(?:@(?P<revision>{_REFERENCE}|[^/]*))?"
    r"(?:/(?P<path>.*))?",
    re.ASCII | re.DOTALL,
)
_GIT_NAME = re.compile(r"[0-9a-f]{40}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40,64}", re.ASCII)
_OTHER_KINDS = ("datasets", "spaces", "kernels", "buckets")
_MAX_ANSWER = 16 * 2**20
# Pages of a listing, of 1,000 files each.
_MAX_PAGES = 100


@dataclass(frozen=True, slots=True)
class HubTarget:
    """A repository of the Hub at a revision, or a file or folder in it.

    ``path`` is empty for the repository itself.
    """

    repository: str
    revision: str
    path: str

    def __str__(self) -> str:
        at = (
            self.revision if _PLAIN_REFERENCE.fullmatch(self.revision) else quote(self.revision, "")
        )
        revision = "" if self.revision == MAIN else f"@{at}"
        return f"{HUB_SCHEME}{self.repository}{revision}{'/' if self.path else ''}{self.path}"

    def url(self, endpoint: str, revision: str | None = None) -> str:
        """Return the address of its files at ``revision`` (None: its own), with ``/`` at its end.

        Raises: UsageError (rule R2) for an invalid repository name or revision.
        """
        if not is_repository(self.repository):
            raise UsageError(
                f"not a repository's name: {quoted(self.repository)} (rule R2)",
                rule="R2",
                hint="Write ORGANISATION/NAME, such as bigscience/bloom.",
            )
        own = self.revision
        if _REVISION.fullmatch(own) is None:
            raise UsageError(f"not a branch, tag or commit: {quoted(own)} (rule R2)", rule="R2")
        path = "".join(f"/{quote(part, safe='')}" for part in PurePosixPath(self.path).parts)
        at = quote(revision or own, safe="")
        return f"{endpoint.rstrip('/')}/{self.repository}/resolve/{at}{path}/"


def is_repository(name: str) -> bool:
    """Return True for a name that a repository of the Hub may have: ORG/NAME, or NAME."""
    return _REPOSITORY.fullmatch(name) is not None and not name.endswith(".git")


def parse_hub(text: str) -> HubTarget:
    """Return the target of an ``hf://`` address.

    Raises: UsageError if the address is not a model's, or breaks rule P1.
    """
    body = text[len(HUB_SCHEME) :]
    if body.partition("/")[0] in _OTHER_KINDS:
        raise UsageError(f"{quoted(text)} is not a model of the Hub")
    match = _IN_HUB.fullmatch(body)
    if match is None or match["revision"] == "":
        raise UsageError(
            f"{quoted(text)} has no revision after its @", hint="hf://ORG/NAME@REVISION/PATH"
        )
    revision = unquote(match["revision"] or MAIN)
    return HubTarget(match["repository"], revision, _path(match["path"] or "", text))


def parse_hub_page(url: str, endpoint: str = HUB) -> HubTarget | None:
    """Return the target of a page of the Hub; None for every other address.

    Raises: UsageError for a path in it that breaks rule P1.
    """
    try:
        parts, hub = urlsplit(url), urlsplit(endpoint)
    except ValueError:  # no URL: brackets that are not closed
        return None
    base = hub.path.rstrip("/") + "/"
    if (parts.scheme, parts.netloc.lower()) != (
        hub.scheme,
        hub.netloc.lower(),
    ) or not parts.path.startswith(base):
        return None
    owner, *more = (unquote(part) for part in parts.path.removeprefix(base).rstrip("/").split("/"))
    if not owner or not more or owner in (*_OTHER_KINDS, "api"):
        return None
    repository = f"{owner}/{more[0]}"
    if len(more) == 1:
        return HubTarget(repository, MAIN, "")
    is_page = more[1] in ("tree", "blob", "resolve", "raw") and more[2:]
    return HubTarget(repository, more[2], _path("/".join(more[3:]), url)) if is_page else None


def _path(path: str, text: str) -> str:
    path = path.rstrip("/")
    try:
        return relative_path(path) if path else ""
    except InvalidNameError as error:
        raise UsageError(f"{quoted(text)}: {error.message}", rule=error.rule) from None


def open_web_folder(remote: Remote, text: str, endpoint: str) -> WebFolder:
    """Return the folder at an http, https or hf address, or that the named file is in.

    Raises: UsageError for an invalid address.
    """
    if text.lower().startswith(HUB_SCHEME):
        target: HubTarget | None = parse_hub(text)
    else:
        WebAddress.parse(text)  # which raises for what is not one
        target = parse_hub_page(text, endpoint)
    if target is not None:
        path, file = split_file(target.path)
        return HubFolder(remote, replace(target, path=path), endpoint, file)
    parts = urlsplit(text)
    above, _, last = parts.path.rpartition("/")
    name = unquote(last)
    if not parts.query and split_file(name)[1] is None:
        return WebFolder(remote, text)
    base = parts._replace(query="", fragment="", path=f"{above}/").geturl()
    # A signed address is good for this file only; an index is read as its folder's other files are.
    return WebFolder(remote, base, file=name, url=None if is_index(name) else text)


class HubFolder(WebFolder):
    """A repository of the Hub, or a folder in it, at one commit.

    A server that does not answer the Hub's API (a plain mirror of its files) is read as a
    `WebFolder` at the requested revision.
    """

    def __init__(
        self, remote: Remote, target: HubTarget, endpoint: str, file: str | None = None
    ) -> None:
        """``target.path`` is the folder, ``file`` a file in it.

        Raises: UsageError (rule R2) for an invalid repository name, revision or web address.
        """
        self._endpoint = WebAddress.parse(endpoint).text.rstrip("/")
        url = target.url(self._endpoint)
        self._target = target
        self._api = f"{self._endpoint}/api/models/{target.repository}"
        remote.start(f"{self._endpoint}/")  # a token is the endpoint's
        super().__init__(remote, url, file=file)
        self.name = str(target)

    @property
    def base_url(self) -> str:
        return self._target.url(self._endpoint, self.revision)

    @property
    def stem(self) -> str:
        last = self._target.path or self._target.repository
        return stem_of(self.file or last.rpartition("/")[2])

    @property
    def address(self) -> str:
        path = "/".join(filter(None, (self._target.path, self.file)))
        return str(
            replace(self._target, revision=self.revision or self._target.revision, path=path)
        )

    def as_file(self) -> None:
        """Return None: the listing says which paths are files."""

    def names(self) -> list[str] | None:
        return None if self.revision is None else Folder.names(self)

    def scan(self, prefix: str = "", most: int | None = None) -> list[Entry]:
        if self.revision is None:
            return super().scan(prefix, most)
        entries = self._listing.get(prefix, {})
        return [entries[name] for name in sorted(entries)][:most]

    @cached_property
    def revision(self) -> str | None:  # type: ignore[override]  # it is asked for
        """The commit; None if the server does not answer the Hub's API."""
        url = f"{self._api}/revision/{quote(self._target.revision, safe='')}"
        try:
            raw = self._page(f"{url}?expand=sha")[0]
        except NotFoundError:
            return None
        commit = strictjson.parse_object(raw, url, rule="R1").get("sha")
        if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None:
            raise RemoteError(f"{url}: its answer names no commit (rule R1)", rule="R1", path=url)
        return commit

    @cached_property
    def _listing(self) -> dict[str, dict[str, Entry]]:
        """The entries of each folder, by its path with ``/`` at its end."""
        listing: dict[str, dict[str, Entry]] = {}
        base = self.base_url  # not `place`: a listing may have names that can't be stored
        for path, found in self._listing_by_name.items():
            *folders, name = path.split("/")
            prefix = ""
            for folder in folders[: MAX_DEPTH + 1]:  # nothing deeper is walked
                entries = listing.setdefault(prefix, {})
                if folder not in entries:
                    entries[folder] = Entry(folder, base + quote(prefix + folder), is_folder=True)
                prefix += f"{folder}/"
            if len(folders) <= MAX_DEPTH:
                entry = Entry(name, base + quote(prefix + name), found=found)
                listing.setdefault(prefix, {})[name] = entry
        return listing

    @cached_property
    def _listing_by_name(self) -> dict[str, Found]:
        """All files of the commit in the folder, by name; none without the API.

        Raises: LimitExceededError for more than 100 pages.
        """
        files: dict[str, Found] = {}
        if self.revision is None:
            return files
        above = f"{self._target.path}/" if self._target.path else ""
        url, query = f"{self._api}/tree/{self.revision}", "recursive=true"
        for _ in range(_MAX_PAGES):
            raw, following = self._page(f"{url}?{query}")
            for path, found in _files_of(raw, url):
                if path.startswith(above):
                    files[path.removeprefix(above)] = found
            if following is None:
                return files
            query = _query_of(following, url)  # of the same address: the server does not choose it
        raise LimitExceededError(
            f"limit exceeded: {self.name} lists more than {_MAX_PAGES} pages of files",
            path=self.name,
        )

    def _page(self, url: str) -> tuple[bytes, str | None]:
        return self._remote.read_page(url, _MAX_ANSWER, self._remote.limits(0, self.budget))

    def read_all(self, names: Sequence[str], limit: int) -> dict[str, bytes]:
        documents = super().read_all(names, limit)
        for name, data in documents.items():
            if (found := self._listing_by_name.get(name)) is not None:
                found.check_bytes(data, self.place(name))
        return documents

    def _found(self, file: RemoteFile) -> Found:
        entry = self._listing_by_name.get(self._name_of(file))
        if entry is None or file.size == UNKNOWN_SIZE:
            return super()._found(file)
        if file.size != entry.size:
            raise RemoteError(
                f"{file.name} has {file.size} bytes, and {entry.size:,} in the"
                " repository's listing (rule R1)",
                rule="R1",
                path=file.name,
            )
        return entry


def _query_of(address: str, place: str) -> str:
    """Return the query of a next page's address. Raises: RemoteError (rule R1)."""
    with suppress(ValueError):
        query = urlsplit(address).query
        if query and query.isascii() and query.isprintable():
            return query
    raise RemoteError(
        f"{place}: the address of its next page is invalid (rule R1)", rule="R1", path=place
    )


def _files_of(raw: bytes, place: str) -> list[tuple[str, Found]]:
    """Return the files of one page of a listing. Raises: RemoteError (rule R1)."""
    try:
        return [_file_of(row) for row in strictjson.parse(raw) if row["type"] == "file"]
    except (BlobStoreError, strictjson.StrictJsonError, KeyError, TypeError, ValueError) as error:
        raise RemoteError(
            f"{place}: its answer is not a listing of files (rule R1)", rule="R1", path=place
        ) from error


def _file_of(row: dict[str, Any]) -> tuple[str, Found]:
    """Return a file's path and state: its content's hash, which is a SHA-256 for large files."""
    size, identity, large = row["size"], row["oid"], row.get("lfs")
    if type(size) is not int or size < 0 or not isinstance(identity, str):
        raise ValueError("a file without a size or a hash")
    digest = Digest(large["oid"]) if large is not None else None
    state = WebIdentity(f"{identity if digest is None else digest.hex} {size}")
    path = row["path"]
    if not isinstance(path, str) or {"", ".", ".."} & set(path.split("/")):
        raise ValueError("a path that leads elsewhere")
    git = identity if digest is None and _GIT_NAME.fullmatch(identity) else None
    return path, Found(size, state, digest, git)
